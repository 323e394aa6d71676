"""The plan of strategy tree: the typical data-parallel training of Le et al. 2018, section 2.3.

    worker0 compute   load fwd bwd |       add 1        add 2 |                step | load fwd
    worker0 exchange               | [up1]       [up2]        | [down2][down1]
    worker2 exchange               | [up3]       [up2]        | [down2][down3]

After backward the gradients go up a binary tree: of distance 1, 2, 4, ... is a worker from its
parent, which adds what it gets to what it has. The means come down the same tree, the largest
distance first, where the paper sends the weights that worker 0 has updated: as many bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.calibration import Line, Measurements, line_through, linked
from paceline.core.cost import compute_lane, copy_lanes, exchange_lane
from paceline.core.machine import Device, Machine
from paceline.core.memory import replica_nbytes
from paceline.core.plan import COMPUTE, Cost, Kind, Plan, Task, task_name
from paceline.core.simulate import simulate
from paceline.core.step import ComputeStep, after_update
from paceline.core.strategy import Window
from paceline.core.transfer import Transfer, lanes_of
from paceline.core.workload import Layer, Parameter, Workload
from paceline.strategies.tree.config import Tree

_ADD_TRAFFIC = 3  # bytes of memory traffic for each byte added: two are read and one is written
_MESSAGE_TRAFFIC = 4  # between processes: read, written, read and written again
_SHARE = _ADD_TRAFFIC / _MESSAGE_TRAFFIC


def parent(rank: int) -> int | None:
    """Return whom a rank sends its gradients to: the rank without the lowest bit that is set."""
    return rank & (rank - 1) if rank else None


def children(rank: int, world_size: int) -> list[int]:
    """Return whose gradients a rank adds, in that order: the nearest first."""
    lowest = rank & -rank or world_size
    distances = (1 << level for level in range(world_size.bit_length()))
    return [rank + d for d in distances if d < lowest and rank + d < world_size]


def plan(workload: Workload, machine: Machine, config: Tree, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the machine has fewer devices or they are not linked.
    """
    devices = machine.first_devices(config.workers)
    edges = tuple(
        _Edge.of(machine, devices, child, above, workload.gradient_nbytes)
        for child, above in _upwards(len(devices))
    )
    work = _Step(ComputeStep(workload, devices), edges)
    return Plan.of_steps(work.tasks, window.num_steps)


def memory(workload: Workload, machine: Machine, config: Tree) -> Mapping[str, int]:
    """Return the bytes that each device needs: a replica, and for each child what it sends."""
    devices = machine.first_devices(config.workers)
    replica = replica_nbytes(workload)
    return {
        device.name: replica + len(children(rank, len(devices))) * workload.gradient_nbytes
        for rank, device in enumerate(devices)
    }


def _upwards(num_workers: int) -> list[tuple[int, int]]:
    """Return each worker but the first with its parent, the nearest first."""
    pairs = [(child, p) for child in range(num_workers) if (p := parent(child)) is not None]
    return sorted(pairs, key=lambda pair: (pair[0] - pair[1], pair[0]))


@dataclass(frozen=True)
class _Edge:
    """What messages between a worker and its parent hold and cost, and what an addition does."""

    child: int
    parent: int
    up: Transfer
    add: Transfer
    down: Transfer

    @classmethod
    def of(
        cls, machine: Machine, devices: Sequence[Device], child: int, above: int, nbytes: int
    ) -> "_Edge":
        below, top = devices[child], devices[above]
        addition = Cost(nbytes=_ADD_TRAFFIC * nbytes, num_calls=1)
        return cls(
            child,
            above,
            up=_message(machine, below, top, nbytes),
            add=Transfer(copy_lanes(top), addition),
            down=_message(machine, top, below, nbytes),
        )

    def tasks_up(self, step: int, after: tuple[str, ...]) -> tuple[Task, Task]:
        """Return the message with the gradients, and their addition at the parent."""
        send = self._send(step, f"up{self.child}", self.up, after)
        part = f"{self.child}"
        name = task_name(step, Kind.REDUCE, part, self.parent)
        return send, Task(name, Kind.REDUCE, self.add.on, self.add.cost, (send.name,), part)

    def task_down(self, step: int, after: tuple[str, ...]) -> Task:
        """Return the message with the means."""
        return self._send(step, f"down{self.child}", self.down, after)

    def _send(self, step: int, part: str, message: Transfer, after: tuple[str, ...]) -> Task:
        name = task_name(step, Kind.SEND, part)
        return Task(name, Kind.SEND, message.on, message.cost, after, part)


def _message(machine: Machine, source: Device, target: Device, nbytes: int) -> Transfer:
    route = machine.route(source, target)
    on = (*lanes_of(route), exchange_lane(source.name), exchange_lane(target.name))
    if any(hop.link.uses_cores for hop in route):
        on += (compute_lane(source.name), compute_lane(target.name))
    return Transfer(on, Cost(nbytes=nbytes, num_calls=1))


@dataclass(frozen=True)
class _Step:
    """What every step of the window does, priced once."""

    compute: ComputeStep
    edges: tuple[_Edge, ...]

    def tasks(self, step: int) -> Iterator[Task]:
        for worker in self.compute.workers:
            yield from self.compute.tasks(step, worker, after_update(step, worker))
        done = [self.compute.after_backward(step, worker) for worker in self.compute.workers]
        for edge in self.edges:
            up, add = edge.tasks_up(step, (done[edge.child], done[edge.parent]))
            yield from (up, add)
            done[edge.parent] = add.name
        for edge in reversed(self.edges):
            down = edge.task_down(step, (done[edge.parent],))
            yield down
            done[edge.child] = done[edge.parent] = down.name
        for worker in self.compute.workers:
            yield self.compute.step_task(step, worker, (done[worker],))


def calibrate(machine: Machine, measured: Measurements, config: Tree | None = None) -> Machine:
    """Return the machine whose links, one for each edge of the tree, are as fast as measured.

    Within one host messages and additions are taken to be traffic of one memory, which sets how
    fast it is. Elsewhere additions are as fast as the machine says, and links get what remains.
    """
    devices = machine.devices
    pairs = [(devices[child], devices[above]) for child, above in _upwards(len(devices))]
    whole = line_through(measured)
    num_sends, num_additions = _in_turn(linked(machine, pairs, Line(0.0, 1.0)))
    if len(machine.hosts) == 1 and devices[0].kind == "cpu":
        each = Line(
            whole.latency_s / num_sends,
            whole.seconds_per_byte / (num_sends + _SHARE * num_additions),
        )
        machine = _with_memory(machine, _MESSAGE_TRAFFIC / each.seconds_per_byte)
    else:
        add = _slowest_addition(machine)
        rest_s = whole.seconds_per_byte - num_additions * add.seconds_per_byte
        each = Line(
            max(0.0, whole.latency_s - num_additions * add.latency_s) / num_sends,
            max(0.01 * whole.seconds_per_byte, rest_s) / num_sends,
        )
    return linked(machine, pairs, each)


def _in_turn(machine: Machine) -> tuple[float, float]:
    """Return how many messages, and how many additions, follow one another in an exchange.

    That is so as long as an addition does not take longer than a message.
    """
    layer = Layer("one", (Parameter("one", (1,)),), 0, Cost(), Cost())
    workload = Workload("one", 1, (layer,), (0,), 0)
    tasks = plan(workload, machine, Tree(workers=len(machine.devices)), Window(1))
    num_sends = simulate(tasks, _InMessages(0.0)).makespan_s
    both = simulate(tasks, _InMessages(_SHARE)).makespan_s
    return num_sends, (both - num_sends) / _SHARE


@dataclass(frozen=True)
class _InMessages:
    """Prices an exchange alone, with a message as the unit."""

    addition: float

    def seconds(self, task: Task) -> float:
        """Return how many messages a task takes as long as."""
        if task.kind in COMPUTE:
            return 0.0
        return 1.0 if task.kind is Kind.SEND else self.addition


def _with_memory(machine: Machine, nbytes_per_s: float) -> Machine:
    fact = {"memory_bandwidth_bytes_per_s": nbytes_per_s}
    hosts = tuple(host.model_copy(update=fact) for host in machine.hosts)
    return machine.model_copy(update={"hosts": hosts})


def _slowest_addition(machine: Machine) -> Line:
    """Return what it takes a device to add, if it is the slowest to do so."""
    on_gpus = [device for device in machine.devices if device.kind == "gpu"]
    slowest = min(part.memory_bandwidth_bytes_per_s for part in on_gpus or machine.hosts)
    latency_s = max((device.call_latency_s for device in on_gpus), default=0.0)
    return Line(latency_s, _ADD_TRAFFIC / slowest)
