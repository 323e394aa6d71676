"""Plan the sum of gradients in a binary tree (Le et al. 2018, section 2.3).

    worker0 compute   load fwd bwd |       add 1        add 2 |                step | load fwd
    worker0 exchange               | [up1]       [up2]        | [down2][down1]
    worker2 exchange               | [up3]       [up2]        | [down2][down3]

After the backward pass, workers send gradients up a binary tree. A worker's rank differs from its
parent's rank by 1, 2, 4, ...; a parent adds the gradients that it receives. Then the means are sent
down, to the children with the largest rank difference first. The paper sends updated weights
instead of means; both have the same size.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from paceline.core.cost import compute_lane, copy_lanes, exchange_lane
from paceline.core.link_fit import ExchangeSamples, LinearTime, line_through, linked
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import COMPUTE, Cost, Kind, Plan, Task, TaskId
from paceline.core.simulate import simulate
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Transfer, lanes_of
from paceline.core.workload import Layer, Parameter, Workload, replica_nbytes
from paceline.strategies.tree.config import Tree

_ADD_TRAFFIC = 3  # bytes of memory traffic per byte added: two reads and one write
_MESSAGE_TRAFFIC = 4  # bytes of memory traffic per byte sent between processes: two copies
_SHARE = _ADD_TRAFFIC / _MESSAGE_TRAFFIC


def parent(rank: int) -> int | None:
    """Return the rank that receives a rank's gradients; None for rank 0."""
    return rank & (rank - 1) if rank else None  # clears the lowest set bit


def children(rank: int, world_size: int) -> list[int]:
    """Return the ranks that send gradients to a rank, in ascending order."""
    lowest = rank & -rank or world_size
    distances = (1 << level for level in range(world_size.bit_length()))
    return [rank + d for d in distances if d < lowest and rank + d < world_size]


class _Edge(NamedTuple):
    """An edge of the tree, with its two messages and the parent's addition."""

    child: int
    parent: int
    up: Transfer
    add: Transfer
    down: Transfer


def plan(workload: Workload, machine: Machine, config: Tree, window: Window) -> Plan:
    """Plan `window.num_steps` steps on the first `config.workers` devices."""
    devices, nbytes = machine.first_devices(config.workers), workload.gradient_nbytes
    edges = []
    for child, above in _upwards(len(devices)):
        below, top = devices[child], devices[above]
        add = Transfer(copy_lanes(top), Cost(nbytes=_ADD_TRAFFIC * nbytes, num_calls=1))
        up, down = (_message(machine, *ends, nbytes) for ends in ((below, top), (top, below)))
        edges.append(_Edge(child, above, up, add, down))
    step_tasks = partial(_step_tasks, ComputeStep(workload, devices), edges)
    return Plan.of_steps(step_tasks, window.num_steps)


def memory(workload: Workload, machine: Machine, config: Tree) -> Mapping[str, int]:
    """Return the bytes needed on each device: replica, send buffer, a parent's receive buffer."""
    devices = machine.first_devices(config.workers)
    nbytes = workload.gradient_nbytes if len(devices) > 1 else 0
    return {
        device.name: replica_nbytes(workload) + nbytes * (1 + bool(children(rank, len(devices))))
        for rank, device in enumerate(devices)
    }


def _upwards(num_workers: int) -> list[tuple[int, int]]:
    """Return all pairs (worker, its parent) in the order of messages up the tree.

    Pairs with the smallest rank difference come first.
    """
    pairs = [(child, p) for child in range(num_workers) if (p := parent(child)) is not None]
    return sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))


def _message(machine: Machine, source: Device, target: Device, nbytes: int) -> Transfer:
    route = machine.route(source, target)
    on = (*lanes_of(route), exchange_lane(source.name), exchange_lane(target.name))
    if any(hop.link.uses_cores for hop in route):
        on += (compute_lane(source.name), compute_lane(target.name))
    return Transfer(on, Cost(nbytes=nbytes, num_calls=1))


def _step_tasks(compute: ComputeStep, edges: Sequence[_Edge], step: int) -> Iterator[Task]:
    for worker in compute.workers:
        yield from compute.tasks(step, worker)
    done = [compute.after_backward(step, worker) for worker in compute.workers]
    for edge in edges:
        sent = TaskId(step, Kind.SEND, f"up{edge.child}")
        yield Task(sent, *edge.up, (done[edge.child], done[edge.parent]))
        added = TaskId(step, Kind.REDUCE, str(edge.child), edge.parent)
        yield Task(added, *edge.add, (sent,))
        done[edge.parent] = added
    for edge in reversed(edges):
        sent = TaskId(step, Kind.SEND, f"down{edge.child}")
        yield Task(sent, *edge.down, (done[edge.parent],))
        done[edge.child] = done[edge.parent] = sent
    for worker in compute.workers:
        yield compute.step_task(step, worker, (done[worker],))


def calibrate(machine: Machine, measured: ExchangeSamples, config: Tree | None = None) -> Machine:
    """Return the machine with a link per tree edge; all links are fitted to measured exchanges.

    For CPU workers on one host, also fits the host's memory bandwidth, because messages and
    additions share it. For other workers, computes the time of additions from the memory bandwidth
    in `machine`, and fits the links to the remaining time.
    """
    devices = machine.devices
    pairs = [(devices[child], devices[above]) for child, above in _upwards(len(devices))]
    latency_s, seconds_per_byte = line_through(measured)
    num_sends, num_additions = _critical_path(linked(machine, pairs, LinearTime(0.0, 1.0)))
    if len(machine.hosts) == 1 and devices[0].kind == DeviceKind.CPU:
        byte_s = seconds_per_byte / (num_sends + _SHARE * num_additions)
        traffic_per_s = _MESSAGE_TRAFFIC / byte_s
        machine = machine.with_each("hosts", memory_bandwidth_bytes_per_s=traffic_per_s)
        return linked(machine, pairs, LinearTime(latency_s / num_sends, byte_s))
    # Assume that each addition takes as long as on the slowest GPU or host.
    gpus = [device for device in devices if device.kind == DeviceKind.GPU]
    slowest = min(part.memory_bandwidth_bytes_per_s for part in gpus or machine.hosts)
    call_s = max((gpu.call_latency_s for gpu in gpus), default=0.0)
    rest_s = seconds_per_byte - num_additions * _ADD_TRAFFIC / slowest
    each = LinearTime(
        max(0.0, latency_s - num_additions * call_s) / num_sends,
        # Leave messages at least 1 % of the time, even if additions would take all of it.
        max(0.01 * seconds_per_byte, rest_s) / num_sends,
    )
    return linked(machine, pairs, each)


def _critical_path(machine: Machine) -> tuple[float, float]:
    """Return the number of messages and the number of additions on an exchange's critical path."""
    layer = Layer("one", (Parameter("one", (1,)),), 0, Cost(), Cost())
    workload = Workload("one", 1, (layer,), (0,), 0)
    tasks = plan(workload, machine, Tree(workers=len(machine.devices)), Window(1))
    num_sends = simulate(tasks, _InMessages(0.0)).makespan_s
    both = simulate(tasks, _InMessages(_SHARE)).makespan_s
    return num_sends, (both - num_sends) / _SHARE


@dataclass(frozen=True)
class _InMessages:
    """A cost model in which messages take 1, and forward and backward passes 0.

    `addition`: the time of an addition, relative to a message.
    """

    addition: float

    def seconds(self, task: Task) -> float:
        if task.kind in COMPUTE:
            return 0.0
        return 1.0 if task.kind is Kind.SEND else self.addition
