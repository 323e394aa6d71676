"""Simulate Le et al., "Involving CPUs into Multi-GPU Deep Learning" (ICPE 2018).

Strategies `tree` (BVLC/Caffe) and `host` (TRL/Caffe) run on machines/power8-p100.toml. Layers share
the printed time of an iteration on one GPU in proportion to a P100's roofline.
benchmarks/papers/cgdp.md lists the calibrated constants and their cells.

The networks have 8, 22, 16 and 152 layers, as in Table 1. The paper's host strategy synchronises
once per layer. A convolution and its batch normalisation count as one layer, and so do parallel
convolutions of an inception block.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import fsum

import torch
from torch import Tensor, nn

from paceline.core import cost as costs
from paceline.core.chunks import RuntimeSearch
from paceline.core.plan import Kind, Plan, PriceKey
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.host import plan as host
from paceline.strategies.host.config import HostReduce
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree
from paceline.training.models.inception import GoogLeNet
from paceline.training.recipes.named import workload_of
from papers.networks import step_of
from papers.paper_tables import Paper, paper_of, printed_values, read_printed

# Section 5.1, Table 1: images per GPU and step.
BATCH_SIZES: dict[str, int] = read_printed("cgdp")["batch_sizes"]
_INCEPTION = re.compile(r"inceptions\.(\w+)\.(branch[35]\.1)?")
_BOTTLENECK = re.compile(r"(stages\.\d+\.\d+)\.(conv\d|shortcut)")
_HEADS = {"heads.0": "4a", "heads.1": "4d"}
TREE, HOST = "tree", "host"
_WINDOW = 1  # step: each step waits for all updates of the previous step
_MAX_WORKERS = 4
_BATCH_SIZE = BATCH_SIZES["resnet152"]  # of section 5.3
_FIGURE_2 = 16  # images a GPU
# Chunk sizes of figure 2 (1 to 100) that Algorithm 1 may try in increments of 5 or 10.
_SIZES = (*range(1, 10), *range(10, 101, 5))


class TrainedGoogLeNet(GoogLeNet):
    """GoogLeNet with its two auxiliary classifiers, as trained: 13,378,280 parameters.

    Images (N, 3, 224, 224) to three scores (N, 1000), the main classifier's first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([_head(512), _head(528)])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the scores (N, 1000) of the three classifiers."""
        x = self.pool2(self.conv2(self.pool1(self.conv1(images))))
        others = []
        for name, block in self.inceptions.named_children():
            x = block(x)
            others += [self.heads[i](x) for i, at in enumerate(_HEADS.values()) if at == name]
        return (self.classifier(x), *others)


def _head(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AvgPool2d(5, stride=3),
        nn.Conv2d(channels, 128, kernel_size=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 1024),
        nn.ReLU(inplace=True),
        nn.Dropout(0.7),
        nn.Linear(1024, 1000),
    )


@dataclass(frozen=True)
class CountedNetwork:
    """A network with its modules as layers (`fine`), and with the paper's layers (`workload`).

    `members`: the places of the modules in each of the paper's layers.
    """

    fine: Workload
    workload: Workload
    members: Sequence[Sequence[int]]

    def merged(self, times: costs.LayerTimes) -> costs.LayerTimes:
        """Sum the modules' times to times of the paper's layers."""
        forward_s, backward_s = (
            tuple(sum(seconds[i] for i in own) for own in self.members)
            for seconds in (times.forward_s, times.backward_s)
        )
        return costs.LayerTimes(forward_s, backward_s, times.update_s)


@cache
def network(name: str, batch_size: int | None = None) -> CountedNetwork:
    """Return a network of Table 1; `batch_size` defaults to the value in Table 1."""
    size = batch_size or BATCH_SIZES[name]
    if name == "googlenet":
        with torch.device("meta"):
            fine = workload_of(TrainedGoogLeNet(), size, (3, 224, 224))
    else:
        fine = step_of(name, size)
    members: dict[str, list[int]] = defaultdict(list)
    for place, layer in enumerate(fine.layers):
        members[layer_of(layer.name)].append(place)
    merged = tuple(
        _merged(name, [fine.layers[i] for i in places]) for name, places in members.items()
    )
    # A layer's gradients are ready when its last module's gradients are ready.
    ready = {layer_of(layer.name): i for i, layer in enumerate(fine.in_backward_order)}
    order = tuple(sorted(range(len(merged)), key=lambda i: ready[merged[i].name]))
    workload = Workload(fine.name, fine.batch_size, merged, order, fine.input_nbytes)
    return CountedNetwork(fine, workload, tuple(members.values()))


def _merged(name: str, layers: Sequence[Layer]) -> Layer:
    return Layer(
        name,
        tuple(parameter for layer in layers for parameter in layer.parameters),
        layers[-1].activation_nbytes,
        sum((layer.forward for layer in layers), Cost()),
        sum((layer.backward for layer in layers), Cost()),
    )


def layer_of(module: str) -> str:
    """Return the name of the paper's layer that contains a module."""
    for head, block in _HEADS.items():
        if module.startswith(head):
            return f"{block}.second"  # computed in parallel, forward and backward
    if inception := _INCEPTION.match(module):
        return f"{inception[1]}.{'second' if inception[2] else 'first'}"
    if bottleneck := _BOTTLENECK.match(module):
        layer = "conv3" if bottleneck[2] == "shortcut" else bottleneck[2]
        return f"{bottleneck[1]}.{layer}"
    return "stem" if module.startswith("stem.") else module


# Printed milliseconds of an iteration, by strategy, network and number of GPUs.
TABLE_2: Mapping[tuple[str, str, int], float] = printed_values("cgdp", "table 2")
TABLE_3 = printed_values("cgdp", "table 3")
_FORWARD, _BACKWARD, _UPDATE = (TABLE_3[TREE, one] for one in ("forward", "backward", "update"))
_COMPUTE = _FORWARD + _BACKWARD
# Slowdown of computation when other GPUs run: the compute phases on four GPUs (table 3) relative to
# an iteration on one GPU (table 2).
BESIDE_OTHERS = (_COMPUTE + _UPDATE) / TABLE_2[TREE, "alexnet", 1]


_MACHINE = find_machine("power8-p100")
_PRICES = costs.Roofline.of(_MACHINE)
# A P100's arithmetic and memory rates, as reached with AlexNet.
_RATE = _PRICES.rates[costs.compute_lane(_MACHINE.devices[0].name)]


def update_s(workload: Workload) -> float:
    """Return the seconds of a weight update on one GPU, in proportion to the number of weights."""
    alexnet = network("alexnet").workload
    share = workload.num_parameters / alexnet.num_parameters
    return _UPDATE / 1e3 / BESIDE_OTHERS * share


@cache
def times_alone(name: str) -> costs.LayerTimes:
    """Return layer times on one GPU that add up to table 2's iteration."""
    known = network(name)
    step_s = TABLE_2[TREE, name, 1] / 1e3
    rest_s = step_s - update_s(known.workload)
    totals = costs.Totals(
        rest_s * _FORWARD / _COMPUTE,
        rest_s * _BACKWARD / _COMPUTE,
        update_s(known.workload),
    )
    return known.merged(costs.layer_times(known.fine, _RATE, totals))


@cache
def times_of_resnet(batch_size: int) -> costs.LayerTimes:
    """Estimate ResNet-152's layer times on one GPU, which the paper does not print."""
    # Arithmetic and memory traffic alone do not explain the time of networks with small layers, so
    # each call has a latency, fitted to GoogLeNet's iteration in table 2.
    fine = network("googlenet").fine
    num_calls = sum(layer.forward.num_calls + layer.backward.num_calls for layer in fine.layers)
    without = costs.layer_times(fine, replace(_RATE, call_latency_s=0.0))
    rest_s = TABLE_2[TREE, "googlenet", 1] / 1e3 - update_s(fine)
    call_s = (rest_s - fsum(without.forward_s) - fsum(without.backward_s)) / num_calls
    known = network("resnet152", batch_size)
    times = costs.layer_times(known.fine, replace(_RATE, call_latency_s=call_s))
    return known.merged(times._replace(update_s=update_s(known.workload)))


def step_ms(
    known: CountedNetwork, alone: costs.LayerTimes, strategy: str, workers: int, chunk: int = 1
) -> float:
    """Return the milliseconds of a training step on several GPUs.

    `alone`: layer times on one GPU.
    """
    work = known.workload

    def planned(num_steps: int) -> Plan:
        window = Window(num_steps)
        if strategy == HOST:
            return host.plan(work, _MACHINE, HostReduce(workers=workers, chunk=chunk), window)
        return tree.plan(work, _MACHINE, Tree(workers=workers), window)

    durations: dict[PriceKey, float] = {}
    for device in _MACHINE.devices:
        durations[PriceKey(device.name, Kind.LOAD)] = 0.0  # loaded during the previous step
        durations[PriceKey(device.name, Kind.STEP)] = BESIDE_OTHERS * alone.update_s
        for kind, times in ((Kind.FORWARD, alone.forward_s), (Kind.BACKWARD, alone.backward_s)):
            for layer, seconds in zip(work.layers, times, strict=True):
                durations[PriceKey(device.name, kind, layer.name)] = BESIDE_OTHERS * seconds
    return 1e3 * period(planned, costs.ProfiledCost(durations, _PRICES), _WINDOW)


def paper() -> Paper:
    """Return the paper's tables with the times of the plans."""
    return paper_of(
        "cgdp",
        {
            "table 2": lambda strategy, name, workers: step_ms(
                network(name), times_alone(name), strategy, workers
            ),
            "table 5": less_memory_mb,
            "section 5.3": _gain_of_best_chunk,
            "figure 2": _resnet,
        },
    )


def less_memory_mb(name: str) -> float:
    """Return the megabytes that host saves on the fullest GPU, compared with tree.

    Caffe's GPU 0 has a gradient buffer for each GPU that sends to it. The paper's host strategy
    needs no such buffers (section 5.2.4). The value does not describe Paceline's own buffers.
    """
    nbytes = network(name).workload.gradient_nbytes
    return len(tree.children(0, _MAX_WORKERS)) * nbytes / 1e6


def _gain_of_best_chunk(name: str) -> float:
    """Return the step time with chunk size 1, the paper's best, over our shortest time."""
    known, alone = network(name), times_alone(name)
    sizes = range(1, len(known.workload.layers))
    times = [step_ms(known, alone, HOST, _MAX_WORKERS, size) for size in sizes]
    return times[0] / min(times)


@cache
def resnet_step_ms(strategy: str, chunk: int = 1, batch_size: int = _BATCH_SIZE) -> float:
    """Return the milliseconds of a step of ResNet-152 on four GPUs."""
    known, times = network("resnet152", batch_size), times_of_resnet(batch_size)
    return step_ms(known, times, strategy, _MAX_WORKERS, chunk)


def _resnet(what: str, *of: int) -> float | str:
    """Return a cell of figure 2 ("slower" or "faster") or of section 5.3."""
    if what == "speed-up":
        return resnet_step_ms(TREE) / min(resnet_step_ms(HOST, chunk) for chunk in of or _SIZES)
    if what == "found":
        step, reach = of
        num_layers = len(network("resnet152", _BATCH_SIZE).workload.layers)
        search = RuntimeSearch(num_layers, step, reach, interval=1)
        while not search.done:  # as Algorithm 1 does
            search.record(resnet_step_ms(HOST, search.chunk))
        return str(search.chunk)
    chunk, *others = of
    other_ms = min(resnet_step_ms(HOST, size, _FIGURE_2) for size in others or _SIZES)
    return "faster" if resnet_step_ms(HOST, chunk, _FIGURE_2) < other_ms else "slower"
