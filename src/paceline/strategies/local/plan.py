"""Plan rounds of inner steps, and an all-reduce of each fragment's outer gradients per round.

    worker 0 compute   train 0        | during 1 | step 0 | train 1        | during 0 | step 1 ...
    exchange                          [0         ]                         [1         ]

The drawing has two fragments. A step of the plan is one round: each worker takes `sync_every` inner
steps, and sends each fragment of the model once. With two fragments, the first is sent after half
of the inner steps. While a fragment is exchanged, the worker takes `delay` further inner steps; if
`delay` is 0, it waits. Then it takes the outer step and loads the group's parameters. All tasks of
a fragment's exchange belong to the round in which the fragment was sent.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.balance import apportion
from paceline.core.collective import Coding, Collective
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, Transfer, lanes_of
from paceline.core.workload import Layer, Workload, replica_nbytes
from paceline.strategies.local.config import Local

_FLOAT32_NBYTES = 4  # bytes per outer parameter, and per outer gradient without a codec
# Memory accesses per value in an outer step. Outer gradient: 3 (two reads, one write). Mean: 1.
# Momentum: 2. Outer parameters: 2. The worker's parameters: 1.
_STEP_TRAFFIC = 9
_OUTER_STATE = 2  # values kept per parameter: outer parameter and momentum


def plan(workload: Workload, machine: Machine, config: Local, window: Window) -> Plan:
    """Plan a window of rounds with equal batches.

    Raises InvalidInput if the model has fewer layers than fragments, or if `machine` lacks devices,
    links or the codec's speed on a device.
    """
    return _Rounds(workload, machine, config, balanced=False).plan(window.num_steps)


def plan_balanced(workload: Workload, machine: Machine, config: Local, window: Window) -> Plan:
    """Plan a window of rounds with batches split by the workers' speeds; raises as `plan` does."""
    return _Rounds(workload, machine, config, balanced=True).plan(window.num_steps)


def memory(workload: Workload, machine: Machine, config: Local) -> Mapping[str, int]:
    """Return the bytes of each device and host.

    A device has a replica. A host has the outer parameters and momentum of each of its workers.
    """
    devices = machine.first_devices(config.workers)
    needed = dict.fromkeys((device.name for device in devices), replica_nbytes(workload))
    kept = _OUTER_STATE * _FLOAT32_NBYTES * workload.num_parameters
    for device in devices:
        needed[device.host] = needed.get(device.host, 0) + kept
    return needed


def fragments_of(workload: Workload, config: Local) -> tuple[tuple[Layer, ...], ...]:
    """Assign the layers that have parameters to fragments in turn.

    Raises InvalidInput if a fragment would get no layer.
    """
    layers = [layer for layer in workload.layers if layer.parameters]
    if len(layers) < config.fragments:
        raise InvalidInput(
            "fragments",
            f"must be at most {len(layers)}, the number of layers with parameters in "
            f"{workload.name}",
            got=config.fragments,
        )
    return tuple(tuple(layers[i :: config.fragments]) for i in range(config.fragments))


def inner_steps_of(
    machine: Machine,
    devices: Sequence[Device],
    config: Local,
    workload: Workload,
    balanced: bool,
) -> tuple[int, ...]:
    """Return each worker's work in a round, as a number of equal inner steps.

    The number is `sync_every`. If batches are `balanced`, a worker has larger or smaller batches,
    so the number is proportional to its device's speed.
    """
    if not balanced:
        return (config.sync_every,) * len(devices)
    rates = costs.Roofline.of(machine).rates
    lanes = [costs.compute_lane(device.name) for device in devices]
    steps = [inner_step(workload, rates[lane]) for lane in lanes]
    speeds = [1 / rates[lane].seconds(cost) for cost, lane in zip(steps, lanes, strict=True)]
    return tuple(max(1, one) for one in apportion(config.sync_every * len(devices), speeds))


def inner_step(workload: Workload, rate: costs.Rate) -> Cost:
    """Return a worker's inner step as a single cost, for a device with the given rate.

    Arithmetic limits some layers, and memory bandwidth limits others. So the returned flops are not
    the step's flops: they are the seconds of all parts in sequence, times the device's flops/s.
    """
    step = ComputeStep(workload, ())
    passes = [cost for layer in workload.layers for cost in (layer.forward, layer.backward)]
    parts = [step.load, workload.accumulated, *passes, step.update]
    return Cost(
        flops=rate.flops_per_s * fsum(map(rate.work_s, parts)),
        nbytes=fsum(part.nbytes for part in parts),
        num_calls=sum(part.num_calls for part in parts),
    )


class Turn(NamedTuple):
    """Numbers of inner steps before a fragment is sent.

    `overlapped`: steps during the previous fragment's exchange. `alone`: steps after the exchange.
    """

    overlapped: int
    alone: int


def turns(config: Local, num_steps: int) -> tuple[Turn, ...]:
    """Return the inner steps before each fragment is sent, in a round of `num_steps`."""
    sent = [0, *(config.sent_after(fragment) for fragment in range(config.fragments))]
    scale = num_steps / config.sync_every
    counts = [round(after * scale) - round(before * scale) for before, after in pairwise(sent)]
    overlapped = [min(round(config.delay * scale), count) for count in counts]
    return tuple(Turn(own, count - own) for own, count in zip(overlapped, counts, strict=True))


class _Work(NamedTuple):
    """A worker's costs for a fragment; a cost is None if there is no such work.

    `overlapped`: inner steps during the previous fragment's exchange. `alone`: inner steps after
    this exchange. `first`: all inner steps before the run's first fragment is sent. `step`: the
    outer step. `copy`: a copy between a GPU and its host, in one direction.
    """

    on: tuple[Resource, ...]
    overlapped: Cost | None
    alone: Cost | None
    first: Cost | None
    step: Transfer
    copy: Cost | None


class _Rounds:
    """Makes the tasks of rounds.

    The cost objects are created once, because a plan recognises equal costs by object identity.
    """

    def __init__(
        self, workload: Workload, machine: Machine, config: Local, *, balanced: bool
    ) -> None:
        self.machine, self.devices = machine, machine.first_devices(config.workers)
        fragments = fragments_of(workload, config)
        self.counts = [sum(layer.num_parameters for layer in layers) for layers in fragments]
        num_workers = Counter(device.host for device in self.devices)
        self.on_host = [num_workers[device.host] for device in self.devices]
        steps = inner_steps_of(machine, self.devices, config, workload, balanced)
        rates = costs.Roofline.of(machine).rates
        own = [rates[costs.compute_lane(device.name)] for device in self.devices]
        inner = {rate: inner_step(workload, rate) for rate in dict.fromkeys(own)}
        self.work = [
            self._work(config, worker, num_steps, inner[own[worker]])
            for worker, num_steps in enumerate(steps)
        ]
        self.exchanges = self._exchanges(config) if config.workers > 1 else []

    def plan(self, num_rounds: int) -> Plan:
        """Plan a number of rounds."""
        return Plan(self._tasks(num_rounds))

    def _exchanges(self, config: Local) -> list[Collective]:
        lanes = [costs.compute_lane(device.name) for device in self.devices]
        ring = Ring.at_once(self.machine, self.devices, lanes)
        # A GPU's host encodes its outer gradients.
        stations = {
            worker: device if device.kind is DeviceKind.CPU else self.machine.host_of(device)
            for worker, device in enumerate(self.devices)
        }
        coding = None if config.codec is None else Coding.by(config.codec, stations)
        return [
            Collective.over(ring, Kind.REDUCE, str(i), _FLOAT32_NBYTES * count, count, coding)
            for i, count in enumerate(self.counts)
        ]

    def _tasks(self, num_rounds: int) -> Iterator[Task]:
        # For each worker, inner steps during an exchange wait for the tasks in `sent`, and inner
        # steps after an exchange wait for the tasks in `ready`.
        ready: list[tuple[TaskId, ...]] = [()] * len(self.devices)
        sent: list[tuple[TaskId, ...]] = [()] * len(self.devices)
        last: tuple[TaskId, ...] = ()
        for number in range(num_rounds):
            for fragment in range(len(self.counts)):
                for worker in range(len(self.devices)):
                    sent[worker] = yield from self._until_sent(
                        number, fragment, worker, ready[worker], sent[worker]
                    )
                    if self.exchanges and sent[worker]:
                        yield from self.exchanges[fragment].encodes(number, worker, sent[worker][0])
                arrived: list[tuple[TaskId, ...]] = [()] * len(self.devices)
                if self.exchanges:
                    exchange = self.exchanges[fragment]
                    before = [one for ids in sent for one in ids]
                    yield from exchange.tasks(number, before, last)
                    last = (exchange.sent(number),)
                    arrived = [(exchange.result(number, i),) for i in range(len(self.devices))]
                for worker in range(len(self.devices)):
                    after = (*sent[worker], *arrived[worker])
                    ready[worker] = yield from self._stepped(number, fragment, worker, after)

    def _until_sent(
        self,
        number: int,
        fragment: int,
        worker: int,
        ready: tuple[TaskId, ...],
        sent: tuple[TaskId, ...],
    ) -> Generator[Task, None, tuple[TaskId, ...]]:
        """Yield a worker's inner steps before a fragment is sent, and its copy to the host.

        Returns the tasks after which the fragment can be sent.
        """
        work = self.work[worker][fragment]
        travels = number > 0 or fragment > 0
        alone = work.alone if travels else work.first
        if travels and work.overlapped is not None:
            overlapped = TaskId(number, Kind.TRAIN, f"{fragment}.overlapped", worker)
            yield Task(overlapped, work.on, work.overlapped, sent)
            ready += (overlapped,)
        if alone is not None:
            trained = TaskId(number, Kind.TRAIN, str(fragment), worker)
            yield Task(trained, work.on, alone, ready)
            ready = (trained,)
        if work.copy is not None:
            copied = TaskId(number, Kind.D2H, str(fragment), worker)
            yield Task(copied, self._copying(worker, Lane.D2H), work.copy, ready)
            ready = (copied,)
        return ready

    def _stepped(
        self, number: int, fragment: int, worker: int, after: tuple[TaskId, ...]
    ) -> Generator[Task, None, tuple[TaskId, ...]]:
        """Yield a worker's outer step and, for a GPU, the copy back; return the last task."""
        work = self.work[worker][fragment]
        stepped = TaskId(number, Kind.STEP, str(fragment), worker)
        yield Task(stepped, *work.step, after)
        if work.copy is None:
            return (stepped,)
        copied = TaskId(number, Kind.H2D, str(fragment), worker)
        yield Task(copied, self._copying(worker, Lane.H2D), work.copy, (stepped,))
        return (copied,)

    def _copying(self, worker: int, lane: Lane) -> tuple[Resource, ...]:
        device = self.devices[worker]
        ends = device, self.machine.host_of(device)
        route = self.machine.route(*(ends if lane is Lane.D2H else ends[::-1]))
        return Resource(device.name, lane), *lanes_of(route)

    def _work(self, config: Local, worker: int, num_steps: int, step: Cost) -> list[_Work]:
        """Return a worker's costs for each fragment, in rounds of `num_steps`."""
        device = self.devices[worker]
        is_gpu = device.kind is DeviceKind.GPU
        return [
            _Work(
                on=(costs.compute_lane(device.name),),
                overlapped=_times(step, turn.overlapped),
                alone=_times(step, turn.alone),
                first=_times(step, turn.overlapped + turn.alone),
                step=self._outer_step(worker, count),
                copy=Cost(nbytes=_FLOAT32_NBYTES * count, num_calls=1) if is_gpu else None,
            )
            for count, turn in zip(self.counts, turns(config, num_steps), strict=True)
        ]

    def _outer_step(self, worker: int, count: int) -> Transfer:
        """Return the outer step on `count` values, by a CPU worker or a GPU's host.

        The worker's device does not compute during the outer step.
        """
        device = self.devices[worker]
        nbytes = _STEP_TRAFFIC * _FLOAT32_NBYTES * count
        if device.kind is DeviceKind.GPU:
            on = (costs.compute_lane(device.name), Resource(device.host, Lane.REDUCE))
            return Transfer(on, Cost(nbytes=nbytes, num_calls=1))
        turns_taken = costs.lone_core(self.machine.host_of(device))
        # On a single-core host, workers step one after another. Otherwise they step in parallel and
        # share the host's memory bandwidth.
        shared = 1 if turns_taken else self.on_host[worker]
        lanes = (*costs.copy_lanes(device), *turns_taken)
        return Transfer(lanes, Cost(nbytes=shared * nbytes, num_calls=1))


def _times(step: Cost, count: int) -> Cost | None:
    """Multiply the cost of a step by a number of steps; None for 0 steps."""
    if not count:
        return None
    return Cost(count * step.flops, count * step.nbytes, count * step.num_calls)
