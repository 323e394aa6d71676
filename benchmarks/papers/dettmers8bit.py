"""Simulate Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (ICLR 2016).

The machines are a single node with four GPUs on one board (tables 3 and 4, section 5.1), and 32
nodes with 96 GPUs (tables 5, 6 and 7, section 5.2). On these a plan of strategy subbatch splits the
head among all GPUs, which section 5.2.2 leaves out as too complex to analyse, and also sends the
errors back. Convolutions have table 4's times. The machine file `machines/infiniband-96gpu.toml`
prices the head's products, the codec and the messages; its message latency is the latency of table
5's smallest message.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import NamedTuple

from pydantic import TypeAdapter

from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Task
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.plan import LABELS, plan, weights_of
from papers.paper_tables import Paper, paper_of, read_printed

_BOARD, BOARD_GPUS = "pcie-4gpu", 4
_CLUSTER, _CLUSTER_GPUS = "infiniband-96gpu", 96
BATCH = 128  # samples per GPU
TOTAL_MS = 104.1  # section 5.1.2
FC_MS = 6.5  # sum of the fully connected layers, as table 4 prints it


class AlexNetLayer(NamedTuple):
    """A layer of table 4: its shape, and milliseconds of fprop, bprop and update.

    `handed_on`: number of values per image that the next layer receives. `parallel_ms`: times of a
    fully connected layer that is split over four GPUs.
    """

    label: str
    outputs: int
    inputs: tuple[int, ...]
    handed_on: int
    baseline_ms: tuple[float, float, float]
    parallel_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)


_PRINTED = read_printed("dettmers8bit")
_Layers = TypeAdapter(tuple[AlexNetLayer, ...])
CONVOLUTIONS = _Layers.validate_python(_PRINTED["convolutions"])
CONNECTED = _Layers.validate_python(_PRINTED["connected"])


def paper() -> Paper:
    """Compute the paper's tables with our values."""

    def on_cluster(what: str, sub_batch: int, bits: int) -> float:
        return getattr(_on_cluster(sub_batch, bits), what)

    tables = ("table 5, planned", "table 6, planned, single", "table 6, planned, total")
    tables += ("table 7, planned",)
    return paper_of(
        "dettmers8bit",
        {"table 3": _table_3, "simulated": on_board, **dict.fromkeys(tables, on_cluster)},
    )


def alexnet() -> Workload:
    """Return table 4's network on 128 images; costs are zero, as table 4 prints the times."""
    made = []
    for row in (*CONVOLUTIONS, *CONNECTED):
        weight = Parameter("weight", (row.outputs, *row.inputs))
        made.append(Layer(row.label, (weight,), 4 * BATCH * row.handed_on, Cost(), Cost()))
    order = tuple(reversed(range(len(made))))
    return Workload("AlexNet", BATCH, tuple(made), order, 4 * BATCH * 3 * 224 * 224)


def _table_3(label: str, bits: int) -> float:
    """Return the milliseconds in which the board's GPUs exchange a row of table 3."""
    layers = alexnet().layers
    body, head = layers[: len(CONVOLUTIONS)], layers[len(CONVOLUTIONS) :]
    nbytes_of = {
        **{layer.name: layer.gradient_nbytes / BOARD_GPUS for layer in body},
        "conv 3 activation": body[-1].activation_nbytes / BOARD_GPUS,
        **{layer.name: float(layer.activation_nbytes) for layer in head},
    }
    is_gradient = label in {one.name for one in body}
    return exchange_ms(nbytes_of[label], bits, is_gradient)


@cache
def exchange_ms(nbytes: float, bits: int, is_gradient: bool) -> float:
    """Return the milliseconds of exchanging `nbytes` of 32-bit values with each other GPU.

    Gradients travel twice, raw and summed (section 5.2.2). In 8 bits, a GPU decodes all values.
    """
    machine = find_machine(_BOARD)
    first, *_, last = machine.devices
    route = machine.route(first, last)
    latency_s = sum(hop.link.latency_s for hop in route)
    pace = max(1 / hop.link.bandwidth_bytes_per_s for hop in route)
    in_turn = _messages_in_turn(machine) * (2 if is_gradient else 1)
    seconds = in_turn * (latency_s + nbytes * bits / 32 * pace)
    if bits == 8:
        speed, values = first.codecs["eightbit"], nbytes / 4
        seconds += values / speed.encode_values_per_s + speed.latency_s
        seconds += BOARD_GPUS * values / speed.decode_values_per_s + speed.latency_s
    return 1e3 * seconds


def _messages_in_turn(machine: Machine) -> int:
    """Count messages on the busiest link if each device sends to every other device."""
    load = Counter(
        hop for one, other in permutations(machine.devices, 2) for hop in machine.route(one, other)
    )
    return max(load.values())


def on_board(bits: int, total_ms: float) -> float:
    """Return the planned speed-up on four GPUs with table 4's times, scaled to `total_ms`.

    Labels, which table 4 omits, take no time.
    """
    machine, workload, config = find_machine(_BOARD), alexnet(), config_of(BOARD_GPUS, bits)
    parallel: dict[tuple[Kind, str], float] = {}
    for row in CONNECTED:
        forward, errors, weights = row.parallel_ms
        parallel[Kind.FORWARD, row.label] = forward
        parallel[Kind.BACKWARD, row.label] = errors
        parallel[Kind.BACKWARD, weights_of(row.label)] = weights
    known = {}
    for task in plan(workload, machine, config, Window(1)).tasks:
        ms = parallel.get((task.kind, task.part))
        if task.part == LABELS:
            ms = 0.0
        elif (body_ms := _body_ms(task)) is not None:
            ms = body_ms * (total_ms - FC_MS) / (TOTAL_MS - FC_MS)
        if ms is not None:
            known[task.price_key] = 1e-3 * ms
    cost = ProfiledCost(known, Roofline.of(machine))
    step_s = period(lambda steps: plan(workload, machine, config, Window(steps)), cost, 2)
    return BOARD_GPUS * total_ms / (1e3 * step_s)


def config_of(gpus: int, bits: int, sub_batch: int | None = None) -> SubBatch:
    """Return the strategy's configuration, with 8-bit activations and errors or without."""
    codec = None if bits == 32 else "dynamic8"
    return SubBatch(gpus, None, codec, codec, sub_batch=sub_batch)


def _body_ms(task: Task) -> float | None:
    """Return milliseconds of loading, convolutions and updates (0) by table 4; None for others.

    Loading is the part of `TOTAL_MS` that table 4 does not list.
    """
    if task.kind is Kind.STEP:
        return 0.0
    if task.kind is Kind.LOAD:
        return TOTAL_MS - FC_MS - sum(sum(row.baseline_ms) for row in CONVOLUTIONS)
    times = {row.label: row.baseline_ms for row in CONVOLUTIONS}
    if task.part not in times or task.kind not in (Kind.FORWARD, Kind.BACKWARD):
        return None
    forward, *backward = times[task.part]
    return forward if task.kind is Kind.FORWARD else sum(backward)


class _Planned(NamedTuple):
    """Planned values of one sub-batch size: milliseconds, and the speed-up over one GPU.

    `message_ms`, `single_ms`: time to send the head's input activations, for one message and for a
    sub-batch. `total_ms`: time of a step without loading and convolutions.
    """

    message_ms: float
    single_ms: float
    total_ms: float
    speedup: float


@cache
def _on_cluster(sub_batch: int, bits: int) -> _Planned:
    """Plan sub-batches of `sub_batch` samples, sent with `bits` bits per value."""
    machine = find_machine(_CLUSTER).for_workers(_CLUSTER_GPUS, symmetric=True)
    workload, config = _priced_alexnet(), config_of(_CLUSTER_GPUS, bits, sub_batch)
    steps = {number: plan(workload, machine, config, Window(number)) for number in (2, 4)}
    timed = ((task.price_key, _body_ms(task)) for task in steps[2].tasks)
    known = {key: 1e-3 * ms for key, ms in timed if ms is not None}
    prices = ProfiledCost(known, Roofline.of(machine))
    step_ms = 1e3 * period(steps.__getitem__, prices, 2)
    first = workload.layers[len(CONVOLUTIONS)].name
    sends = [task for task in steps[2].tasks if task.kind is Kind.SEND and task.id.step == 0]
    sent = [task for task in sends if task.part == first]
    single_ms = 1e3 * sum(map(prices.seconds, sent)) / len(sent)
    return _Planned(
        message_ms=single_ms / sent[0].cost.num_calls,
        single_ms=single_ms,
        total_ms=step_ms - (TOTAL_MS - FC_MS),
        speedup=_CLUSTER_GPUS * TOTAL_MS / step_ms,
    )


@cache
def _priced_alexnet() -> Workload:
    """Return table 4's network with the costs of its fully connected layers.

    A linear layer has one product forward and two products backward.
    """
    whole = alexnet()
    layers = list(whole.layers)
    for place in range(len(CONVOLUTIONS), len(layers)):
        layer, before = layers[place], layers[place - 1]
        moved = layer.gradient_nbytes + before.activation_nbytes + layer.activation_nbytes
        product = Cost(2 * BATCH * layer.num_parameters, moved, 1)
        layers[place] = replace(layer, forward=product, backward=product + product)
    return replace(whole, layers=tuple(layers))
