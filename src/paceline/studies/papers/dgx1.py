"""Mojumder et al., "Profiling DNN Workloads on a Volta-based DGX-1 System" (IISWC 2018).

A step of MXNet is simulated with the plans of `tree` and `allreduce`, and what MXNet adds. P2P is
strategy `tree`: gradients go up a tree to GPU 0 and weights come down (section II-B). NCCL is
strategy `allreduce`.

    host issue     [load 0][load 1][load 2][load 3]
    gpu0 compute   [load 0] fwd bwd |
    gpu3 compute                           [load 3] fwd bwd |
"""

from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import nn

from paceline.core.cost import Rate, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Lane, Plan, Resource
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.models import find
from paceline.models.inception import InceptionBlock
from paceline.recipes.named import workload_of
from paceline.records.machine_file import find_machine
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree
from paceline.studies.papers.paper_tables import Paper, paper_of, printed_values, read_printed

Method = Literal["P2P", "NCCL"]

_NAMES = {
    "LeNet": "lenet5",
    "AlexNet": "alexnet",
    "GoogLeNet": "googlenet",
    "Inception-v3": "inception-v3",
    "ResNet": "resnet110",
}
# Table I's ResNet has 110 layers and 55M weights on images of 299x299 (section IV-C). The published
# network of 110 layers has far fewer weights, and GPU 0's additional memory in table IV is that of
# three gradients of ResNet-50.
_TRAINED = _NAMES | {"ResNet": "resnet50"}
_BATCHES = (16, 32, 64)  # images in a batch of one GPU, section V-A
_BATCH = _BATCHES[0]
_MEMORY_GPUS = 4  # of table IV
_GB = 1e9
# Seconds that MXNet's one thread takes to start a step of one GPU; it serves them in turn.
# With NCCL it also starts a kernel of each collective on each GPU.
ISSUE_S: dict[Method, float] = {"P2P": 28.9e-6, "NCCL": 67.2e-6}
# The share of NVLink's bandwidth that copies of single tensors reach ("transferring a small amount
# of data is a waste of NVLink BW", section V-C).
COPY_EFFICIENCY = 0.47
# Using NCCL slows down all computation by this factor, even on one GPU (section V-B).
NCCL_STRETCH = 1.185
# NCCL lays its rings over GPUs with direct links. The first four and the first two are rings, too.
RING = (0, 1, 3, 2, 4, 5, 7, 6)
_ISSUE = Resource("mxnet", Lane.ISSUE)
_MACHINE = find_machine("dgx1-v100")


class LayerCounts(NamedTuple):
    """A row of Table I."""

    layers: int
    convolutions: int
    inceptions: int
    fully_connected: int
    weights: int


def paper() -> Paper:
    """Return the tables that can be reproduced, beside our values.

    Of table I these are the cells in which the paper's networks are the published ones:
    papers/dgx1/README.md lists the others. Table IV's LeNet is not one of 60,000 weights.
    """
    best = max(_speedup(name, "P2P", 2, size) for name in _NAMES for size in _BATCHES)
    lenet_s = {size: step_s("LeNet", size, "P2P", 4) / size for size in _BATCHES}
    return paper_of(
        "dgx1",
        {
            "table 1": lambda name, field, digits=0: round(getattr(counts(name), field), digits),
            "lenet": lambda method, gpus: _speedup("LeNet", method, gpus),
            "batches": {
                "LeNet, 4 GPUs, batch 32 over 16": lenet_s[_BATCH] / lenet_s[32],
                "LeNet, 4 GPUs, batch 64 over 16": lenet_s[_BATCH] / lenet_s[64],
                "all networks and batches, 2 GPUs over 1, at best": best,
            },
            "faster": lambda name, gpus: "NCCL" if _gain(name, gpus) > 1 else "P2P",
            "gains": _gain,
            "table 2": lambda name, size: (
                step_s(name, size, "NCCL", 1) / step_s(name, size, "P2P", 1)
            ),
            "table 4": lambda which, name, size: (
                gpu0_gb(name, size) if which == "GPU0" else others_gb(name, size)
            ),
            "growth": lambda name, size: gpu0_gb(name, size) / gpu0_gb(name, _BATCH),
            "section 5-d": largest_batch,
        },
    )


def _speedup(network: str, method: Method, gpus: int, batch_size: int = _BATCH) -> float:
    alone_s = step_s(network, batch_size, method, 1)
    return gpus * alone_s / step_s(network, batch_size, method, gpus)


def _gain(network: str, gpus: int) -> float:
    return step_s(network, _BATCH, "P2P", gpus) / step_s(network, _BATCH, "NCCL", gpus)


@cache
def workload(network: str, batch_size: int) -> Workload:
    """Return the work of a GPU in a step of the network that the paper presumably trained."""
    shape = (3, 299, 299) if network == "ResNet" else None
    return workload_of(_TRAINED[network], batch_size, shape)


def counts(network: str) -> LayerCounts:
    """Return Table I's counts for the published network of that name.

    Layers are those on the longest path through the network, as publications count them;
    convolutions are those outside of inception blocks.
    """
    with torch.device("meta"):
        model = find(_NAMES[network]).build(None)
    outside = list(_outside_blocks(model))
    return LayerCounts(
        layers=_depth(model),
        convolutions=sum(isinstance(module, nn.Conv2d) for module in outside),
        inceptions=sum(_is_parallel(module) for module in outside),
        fully_connected=sum(isinstance(module, nn.Linear) for module in outside),
        weights=sum(parameter.numel() for parameter in model.parameters()),
    )


def _is_parallel(module: nn.Module) -> bool:
    return isinstance(module, InceptionBlock | nn.ModuleList)


def _outside_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the module and its descendants, but none inside of parallel branches."""
    if _is_parallel(module):
        return [module]
    return [module, *(found for child in module.children() for found in _outside_blocks(child))]


def _depth(module: nn.Module) -> int:
    if isinstance(module, nn.Conv2d | nn.Linear):
        return 1
    inner = [_depth(child) for child in module.children()]
    return max(inner) if _is_parallel(module) else sum(inner)


@cache
def step_s(network: str, batch_size: int, method: Method, gpus: int) -> float:
    """Return the seconds of a step in which each GPU trains on a batch of that size."""
    work = workload(network, batch_size)
    machine = machine_with(method)
    rates = {**Roofline.of(machine).rates, _ISSUE: Rate(call_latency_s=ISSUE_S[method])}

    def window(num_steps: int) -> Plan:
        if method == "P2P":
            plan = tree.plan(work, machine, Tree(workers=gpus), Window(num_steps))
        else:
            plan = allreduce.plan(work, machine, AllReduce(workers=gpus), Window(num_steps))
        return fed_in_turn(plan)

    # A window of more steps has the same period: each step waits for the one before.
    return period(window, Roofline(rates), 1)


def machine_with(method: Method) -> Machine:
    """Return the machine as MXNet's copies of tensors (P2P) or NCCL let it be used."""
    if method == "P2P":
        links = []
        for link in _MACHINE.links:
            slower = {"bandwidth_bytes_per_s": COPY_EFFICIENCY * link.bandwidth_bytes_per_s}
            links.append(link.model_copy(update=slower))
        return _MACHINE.model_copy(update={"links": tuple(links)})
    devices = []
    for device in (_MACHINE.devices[number] for number in RING):
        slower = {
            "flops_per_s": device.flops_per_s / NCCL_STRETCH,
            "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s / NCCL_STRETCH,
            "call_latency_s": device.call_latency_s * NCCL_STRETCH,
        }
        devices.append(device.model_copy(update=slower))
    return _MACHINE.model_copy(update={"devices": tuple(devices)})


def fed_in_turn(plan: Plan) -> Plan:
    """Return the plan with GPUs fed one after another by one thread."""
    return Plan(
        task._replace(on=(_ISSUE, *task.on)) if task.kind is Kind.LOAD else task
        for task in plan.tasks
    )


def others_gb(network: str, batch_size: int) -> float:
    """Return the memory of a GPU other than GPU 0 in training, in GB.

    It grows by the same number of bytes with each image, which is calibrated with batches of 16.
    The memory before training (the context, the libraries and the weights) is an input.
    """
    before_gb = read_printed("dgx1")["before_gb"][network][0]
    per_image = (printed_values("dgx1", "table 4")["GPUx", network, _BATCH] - before_gb) / _BATCH
    return float(before_gb + batch_size * per_image)


def gpu0_gb(network: str, batch_size: int) -> float:
    """Return the memory of GPU 0, which also holds the gradients of the three others, in GB."""
    gradients = workload(network, _BATCH).gradient_nbytes
    return others_gb(network, batch_size) + (_MEMORY_GPUS - 1) * gradients / _GB


def largest_batch(network: str) -> int:
    """Return the largest power of two that fits into GPU 0."""
    capacity_gb = _MACHINE.devices[0].memory_bytes / _GB
    batch_size = 1
    while gpu0_gb(network, 2 * batch_size) <= capacity_gb:
        batch_size *= 2
    return batch_size
