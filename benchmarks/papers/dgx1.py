"""Simulate Mojumder et al., "Profiling DNN Workloads on a Volta-based DGX-1 System" (IISWC 2018).

A step is planned by `tree` or `allreduce`, with MXNet's additional costs. P2P is strategy `tree`:
gradients go up a tree to GPU 0 and weights come down (section II-B). NCCL is strategy `allreduce`.
One MXNet thread starts the GPUs' steps in turn:

    host issue     [load 0][load 1][load 2][load 3]
    gpu0 compute   [load 0] fwd bwd |
    gpu3 compute                           [load 3] fwd bwd |
"""

from functools import cache
from typing import Literal

from paceline.core.cost import Rate, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.records.machine_file import find_machine
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree
from paceline.training.recipes.named import workload_of
from papers.dgx1_memory import SMALLEST_BATCH, largest_batch, memory_gb
from papers.paper_tables import Paper, paper_of

Method = Literal["P2P", "NCCL"]

# Table I's ResNet (110 layers, 55M weights, images of 299x299 in section IV-C) is no published
# network. GPU 0's additional memory in table IV equals three gradients of ResNet-50, so times and
# memory are computed for ResNet-50, on MXNet's usual images of 224x224 (`dgx1_memory`).
_TRAINED = {
    "LeNet": "lenet5",
    "AlexNet": "alexnet",
    "GoogLeNet": "googlenet",
    "Inception-v3": "inception-v3",
    "ResNet": "resnet50",
}

_BATCHES = (SMALLEST_BATCH, 32, 64)  # images per GPU, section V-A
_BATCH = _BATCHES[0]
_LENET_32, _LENET_64 = (f"LeNet, 4 GPUs, batch {size} over 16" for size in _BATCHES[1:])
_BEST_OF_TWO = "all networks and batches, 2 GPUs over 1, at best"
# Seconds that MXNet's single thread needs to start a step of one GPU; it starts GPUs in turn.
# With NCCL, the thread also starts a kernel of each collective on each GPU.
ISSUE_S: dict[Method, float] = {"P2P": 32.7e-6, "NCCL": 72.1e-6}
# The share of NVLink's bandwidth that copies of single tensors reach ("transferring a small amount
# of data is a waste of NVLink BW", section V-C).
COPY_EFFICIENCY = 0.561
# Using NCCL slows down all computation by this factor, even on one GPU (section V-B).
NCCL_STRETCH = 1.185
# NCCL reduces and broadcasts each tensor even on one GPU (section V-B): by two kernels, which each
# read and write the tensor.
_KERNELS, _KERNEL_TRAFFIC = 2, 4
_ISSUE = Resource("mxnet", Lane.ISSUE)
_MACHINE = find_machine("dgx1-v100")


def paper() -> Paper:
    """Return the paper's tables with our values.

    Section V-A: plans with MXNet's additional costs. Table II: plans with the machine file and
    section V-B's two kernels per tensor. Memory: `dgx1_memory`.
    """
    best = max(_speedup(name, "P2P", 2, size) for name in _TRAINED for size in _BATCHES)
    lenet_s = {size: step_s("LeNet", size, "P2P", 4) / size for size in _BATCHES}
    return paper_of(
        "dgx1",
        {
            "lenet": lambda method, gpus: _speedup("LeNet", method, gpus),
            "batches": {
                _LENET_32: lenet_s[16] / lenet_s[32],
                _LENET_64: lenet_s[16] / lenet_s[64],
                _BEST_OF_TWO: best,
            },
            "faster": lambda name, gpus: "NCCL" if _gain(name, gpus) > 1 else "P2P",
            "gains": _gain,
            "table 2": lambda name, size: with_kernels_s(name, size) / planned_s(name, size, "P2P"),
            "table 4": lambda which, name, size: memory_gb(name, size, which),
            "section 5-d": lambda name: largest_batch(name, _MACHINE.devices[0].memory_bytes),
        },
    )


def _speedup(network: str, method: Method, gpus: int, batch_size: int = _BATCH) -> float:
    alone_s = step_s(network, batch_size, method, 1)
    return gpus * alone_s / step_s(network, batch_size, method, gpus)


def _gain(network: str, gpus: int) -> float:
    return step_s(network, _BATCH, "P2P", gpus) / step_s(network, _BATCH, "NCCL", gpus)


@cache
def workload(network: str, batch_size: int) -> Workload:
    """Describe one GPU's step of the network that the paper presumably trained."""
    return workload_of(_TRAINED[network], batch_size)


@cache
def step_s(network: str, batch_size: int, method: Method, gpus: int) -> float:
    """Return the seconds of an MXNet step with `batch_size` images per GPU."""
    work = workload(network, batch_size)
    machine = machine_with(method)
    rates = {**Roofline.of(machine).rates, _ISSUE: Rate(call_latency_s=ISSUE_S[method])}
    # A window of one step suffices, because each step waits for the previous step.
    return period(
        lambda num_steps: fed_in_turn(_plan(work, machine, method, gpus, num_steps)),
        Roofline(rates),
        1,
    )


@cache
def planned_s(network: str, batch_size: int, method: Method) -> float:
    """Return the planned seconds of a step on one GPU, without MXNet's additional costs."""
    work = workload(network, batch_size)
    cost = Roofline.of(_MACHINE)
    return period(lambda num_steps: _plan(work, _MACHINE, method, 1, num_steps), cost, 1)


@cache
def with_kernels_s(network: str, batch_size: int) -> float:
    """Return the planned seconds of a step on one GPU, with NCCL's kernels.

    The kernels run one after another, and the update waits for them.
    """
    work = workload(network, batch_size)
    num_tensors = sum(len(layer.parameters) for layer in work.layers)
    traffic = _KERNEL_TRAFFIC * work.gradient_nbytes
    kernels = Cost(nbytes=traffic, num_calls=_KERNELS * num_tensors)

    def plan(num_steps: int) -> Plan:
        return Plan(
            task._replace(cost=task.cost + kernels) if task.kind is Kind.STEP else task
            for task in _plan(work, _MACHINE, "NCCL", 1, num_steps).tasks
        )

    return period(plan, Roofline.of(_MACHINE), 1)


def _plan(work: Workload, machine: Machine, method: Method, gpus: int, num_steps: int) -> Plan:
    if method == "P2P":
        return tree.plan(work, machine, Tree(workers=gpus), Window(num_steps))
    return allreduce.plan(work, machine, AllReduce(workers=gpus), Window(num_steps))


def machine_with(method: Method) -> Machine:
    """Return the machine with links slowed by MXNet's copies (P2P) or devices by NCCL."""
    if method == "P2P":
        links = []
        for link in _MACHINE.links:
            slower = {"bandwidth_bytes_per_s": COPY_EFFICIENCY * link.bandwidth_bytes_per_s}
            links.append(link.model_copy(update=slower))
        return _MACHINE.model_copy(update={"links": tuple(links)})
    first = _MACHINE.devices[0]  # all are equal
    return _MACHINE.with_each(
        "devices",
        flops_per_s=first.flops_per_s / NCCL_STRETCH,
        memory_bandwidth_bytes_per_s=first.memory_bandwidth_bytes_per_s / NCCL_STRETCH,
        call_latency_s=first.call_latency_s * NCCL_STRETCH,
    )


def fed_in_turn(plan: Plan) -> Plan:
    """Return the plan with a single thread that starts the GPUs' steps in turn."""
    return Plan(
        task._replace(on=(_ISSUE, *task.on)) if task.kind is Kind.LOAD else task
        for task in plan.tasks
    )
