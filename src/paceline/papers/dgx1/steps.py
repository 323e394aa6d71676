"""A step of MXNet on the DGX-1: the plans of `tree` and `allreduce`, and what MXNet adds to them.

P2P is strategy `tree`: gradients go up a tree to GPU 0 and weights come down (section II-B).
NCCL is strategy `allreduce`.

    host issue     [load 0][load 1][load 2][load 3]
    gpu0 compute   [load 0] fwd bwd |
    gpu3 compute                           [load 3] fwd bwd |
"""

from dataclasses import replace
from functools import cache

from paceline.core.cost import Rate, Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan, Resource
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.machine_file import find_machine
from paceline.papers.dgx1.networks import workload
from paceline.papers.dgx1.printed import Method
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree

# Seconds that MXNet's one thread takes to start a step of one GPU; it serves them in turn.
# With NCCL it also starts a kernel of each collective on each GPU.
ISSUE_S: dict[Method, float] = {"P2P": 28.9e-6, "NCCL": 67.2e-6}
# What copies of tensors, one by one, reach of NVLink's bandwidth ("transferring a small amount of
# data is a waste of NVLink BW", section V-C).
COPY_EFFICIENCY = 0.47
# By how much all computation is slower if MXNet uses NCCL, even on one GPU (section V-B).
NCCL_STRETCH = 1.185

# NCCL lays its rings over GPUs with direct links. The first four and the first two are rings, too.
RING = (0, 1, 3, 2, 4, 5, 7, 6)

_ISSUE = Resource("mxnet", "issue")
_STEPS = 1  # a longer window has the same period: each step waits for the one before


@cache
def dgx1() -> Machine:
    """Return the machine."""
    return find_machine("dgx1-v100")


@cache
def step_s(network: str, batch_size: int, method: Method, gpus: int) -> float:
    """Return the seconds of a step in which each GPU trains on a batch of that size."""
    work = workload(network, batch_size)
    machine = with_copies(dgx1()) if method == "P2P" else with_nccl(dgx1())
    rates = {**Roofline.of(machine).rates, _ISSUE: Rate(call_latency_s=ISSUE_S[method])}

    def window(num_steps: int) -> Plan:
        if method == "P2P":
            plan = tree.plan(work, machine, Tree(workers=gpus), Window(num_steps))
        else:
            plan = allreduce.plan(work, machine, AllReduce(workers=gpus), Window(num_steps))
        return fed_in_turn(plan)

    return period(window, Roofline(rates), _STEPS)


def with_copies(machine: Machine) -> Machine:
    """Return the machine whose links are as fast as MXNet's copies of tensors."""
    links = tuple(
        link.model_copy(
            update={"bandwidth_bytes_per_s": COPY_EFFICIENCY * link.bandwidth_bytes_per_s}
        )
        for link in machine.links
    )
    return machine.model_copy(update={"links": links})


def with_nccl(machine: Machine) -> Machine:
    """Return the machine as it is where MXNet uses NCCL: slower, and in the order of a ring."""
    devices = tuple(
        device.model_copy(
            update={
                "flops_per_s": device.flops_per_s / NCCL_STRETCH,
                "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s / NCCL_STRETCH,
                "call_latency_s": device.call_latency_s * NCCL_STRETCH,
            }
        )
        for device in (machine.devices[number] for number in RING)
    )
    return machine.model_copy(update={"devices": devices})


def fed_in_turn(plan: Plan) -> Plan:
    """Return the plan with GPUs fed one after another by one thread."""
    return Plan(
        replace(task, on=(_ISSUE, *task.on)) if task.kind is Kind.LOAD else task
        for task in plan.tasks
    )
