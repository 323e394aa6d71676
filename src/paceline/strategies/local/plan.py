"""Plan rounds of inner steps, and an all-reduce of each fragment's outer gradients per round.

    worker 0 compute   train 0        | during 1 | step 0 | train 1        | during 0 | step 1 ...
    exchange                          [0         ]                         [1         ]

The drawing has two fragments, 0 and 1. A step of the plan is one round: each worker takes
`sync_every` inner steps (on its own replica), and sends each fragment (some of the layers) once.
With two fragments, the first is sent after half of the inner steps. While a fragment is exchanged
(`during`), the worker takes `delay` further inner steps, and then waits. After the exchange it
takes the outer step (`step`) and loads the new outer parameters. All tasks of a fragment's exchange
belong to the round in which the fragment was sent, even if they end in the next round.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.balance import apportion
from paceline.core.collective import Coding, Collective
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.step import ComputeStep, HostMemory
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, Transfer
from paceline.core.workload import Layer, Workload, replica_nbytes
from paceline.strategies.local.config import Local

_Ids = tuple[TaskId, ...]
_FLOAT32_NBYTES = 4  # bytes per outer parameter, and per outer gradient without a codec
# Values that an outer step reads or writes per parameter: 3 for the outer gradient (two reads, one
# write), 1 for the mean, 2 for momentum, 2 for the outer parameter, 1 for the worker's parameter.
_STEP_TRAFFIC = 9
_OUTER_STATE = 2  # values kept per parameter: outer parameter and momentum


def plan(
    workload: Workload, machine: Machine, config: Local, window: Window, *, balanced: bool = False
) -> Plan:
    """Plan `window.num_steps` rounds; `balanced`: faster workers have larger batches."""
    return Plan(_Rounds(workload, machine, config, balanced).tasks(window.num_steps))


def memory(workload: Workload, machine: Machine, config: Local) -> Mapping[str, int]:
    """Return the bytes needed on devices (replicas) and hosts (outer parameters, momentum)."""
    devices = machine.first_devices(config.workers)
    needed = dict.fromkeys((device.name for device in devices), replica_nbytes(workload))
    kept = _OUTER_STATE * _FLOAT32_NBYTES * workload.num_parameters
    for device in devices:
        needed[device.host] = needed.get(device.host, 0) + kept
    return needed


def fragments_of(workload: Workload, config: Local) -> tuple[tuple[Layer, ...], ...]:
    """Distribute the layers with parameters over the fragments, one layer to each in turn.

    Raises InvalidInput if there are fewer such layers than fragments.
    """
    layers = [layer for layer in workload.layers if layer.parameters]
    if len(layers) < config.fragments:
        problem = (
            f"must be at most {len(layers)}, "
            f"the number of layers of {workload.name} that have parameters"
        )
        raise InvalidInput("fragments", problem, got=config.fragments)
    return tuple(tuple(layers[i :: config.fragments]) for i in range(config.fragments))


def inner_step(workload: Workload, rate: costs.Rate) -> Cost:
    """Return the cost of a worker's whole inner step, on a device with the given rate.

    The sum of the real flops would predict too short a time, because memory bandwidth limits some
    layers. So the flops of a pass are its time multiplied by the device's flops per second.
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
    """Numbers of inner steps after one fragment is sent and before the next is sent.

    `overlapped`: steps during the exchange of the sent fragment. `alone`: steps after it.
    """

    overlapped: int
    alone: int


def turns(config: Local, num_steps: int) -> tuple[Turn, ...]:
    """Return each fragment's turn, which ends when it is sent; a round has `num_steps` steps."""
    sent = [0, *(config.sent_after(fragment) for fragment in range(config.fragments))]
    scale = num_steps / config.sync_every
    counts = [round(after * scale) - round(before * scale) for before, after in pairwise(sent)]
    overlapped = [min(round(config.delay * scale), count) for count in counts]
    return tuple(Turn(own, count - own) for own, count in zip(overlapped, counts, strict=True))


class _Work(NamedTuple):
    """A worker's resources and costs for a fragment; a field is None if there is no such work.

    `overlapped`, `alone`: the inner steps of the fragment's `Turn`. `first`: all inner steps before
    the run's first exchange. `step`: the outer step. `d2h`, `h2d`: copies between a GPU and its
    host.
    """

    overlapped: Transfer | None
    alone: Transfer | None
    first: Transfer | None
    step: Transfer
    d2h: Transfer | None
    h2d: Transfer | None


class _Rounds:
    """Makes the tasks of all rounds.

    All rounds use the same Cost objects, because a plan compares costs by identity.
    """

    def __init__(self, workload: Workload, machine: Machine, config: Local, balanced: bool) -> None:
        self.machine, self.devices = machine, machine.first_devices(config.workers)
        fragments = fragments_of(workload, config)
        self.counts = [sum(layer.num_parameters for layer in layers) for layers in fragments]
        self.memory = HostMemory(machine, self.devices)
        rates = costs.Roofline.of(machine).rates
        own = [rates[costs.compute_lane(device.name)] for device in self.devices]
        inner = {rate: inner_step(workload, rate) for rate in dict.fromkeys(own)}
        steps = [config.sync_every] * len(own)
        if balanced:  # plan a faster device's larger batches as more steps of equal size
            speeds = [1 / rate.seconds(inner[rate]) for rate in own]
            steps = [max(1, one) for one in apportion(sum(steps), speeds)]
        self.work = [
            self._work(config, device, num_steps, inner[rate])
            for device, num_steps, rate in zip(self.devices, steps, own, strict=True)
        ]
        self.exchanges = self._exchanges(config) if config.workers > 1 else []

    def _exchanges(self, config: Local) -> list[Collective]:
        lanes = [costs.compute_lane(device.name) for device in self.devices]
        ring = Ring.at_once(self.machine, self.devices, lanes)
        # The host of a GPU encodes the GPU's outer gradients.
        stations = {
            worker: device if device.kind is DeviceKind.CPU else self.machine.host_of(device)
            for worker, device in enumerate(self.devices)
        }
        coding = Coding.of(config.codec, stations)
        return [
            Collective.over(ring, Kind.REDUCE, str(i), _FLOAT32_NBYTES * count, count, coding)
            for i, count in enumerate(self.counts)
        ]

    def tasks(self, num_rounds: int) -> Iterator[Task]:
        """Yield the tasks of `num_rounds` rounds."""
        # For each worker, the tasks to wait for. Inner steps during the latest exchange wait for
        # `sent`, the last tasks before it; later inner steps wait for `ready`, the last after it.
        ready: list[_Ids] = [()] * len(self.devices)
        sent: list[_Ids] = [()] * len(self.devices)
        last: _Ids = ()
        for number in range(num_rounds):
            for fragment in range(len(self.counts)):
                for worker in range(len(self.devices)):
                    sent[worker] = yield from self._until_sent(
                        number, fragment, worker, ready[worker], sent[worker]
                    )
                    if self.exchanges and sent[worker]:
                        yield from self.exchanges[fragment].encodes(number, worker, sent[worker][0])
                decoded = dict[int, TaskId]()
                if self.exchanges:
                    exchange = self.exchanges[fragment]
                    before = [one for ids in sent for one in ids]
                    summed, decoded = yield from exchange.tasks(number, before, last)
                    last = (summed,)
                for worker in range(len(self.devices)):
                    arrived = (decoded[worker],) if decoded else last
                    work, after = self.work[worker][fragment], (*sent[worker], *arrived)
                    stepped = (Kind.STEP, work.step), (Kind.H2D, work.h2d)
                    ready[worker] = yield from _chain(number, str(fragment), worker, stepped, after)

    def _until_sent(
        self, number: int, fragment: int, worker: int, ready: _Ids, sent: _Ids
    ) -> Generator[Task, None, _Ids]:
        """Yield a worker's inner steps before it sends a fragment, and a GPU's copy to the host.

        `number`: number of the round. `sent`: the worker's last tasks before the exchange of the
        previous fragment. `ready`: its last tasks after this exchange. Returns the tasks after
        which `fragment` can be sent.
        """
        work = self.work[worker][fragment]
        has_sent = number > 0 or fragment > 0
        if has_sent and work.overlapped is not None:
            overlapped = TaskId(number, Kind.TRAIN, f"{fragment}.overlapped", worker)
            yield Task(overlapped, *work.overlapped, sent)
            ready += (overlapped,)
        trained = (Kind.TRAIN, work.alone if has_sent else work.first), (Kind.D2H, work.d2h)
        return (yield from _chain(number, str(fragment), worker, trained, ready))

    def _work(self, config: Local, device: Device, num_steps: int, step: Cost) -> list[_Work]:
        """Return a worker's costs for each fragment; `num_steps`: inner steps per round."""
        work, on = [], (costs.compute_lane(device.name),)

        def steps(number: int) -> Transfer | None:
            scaled = Cost(number * step.flops, number * step.nbytes, number * step.num_calls)
            return Transfer(on, scaled) if number else None

        for count, (overlapped, alone) in zip(self.counts, turns(config, num_steps), strict=True):
            trains = steps(overlapped), steps(alone), steps(overlapped + alone)
            copies: tuple[Transfer | None, Transfer | None] = None, None
            if device.kind is DeviceKind.GPU:
                copies = self.memory.copies(device, _FLOAT32_NBYTES * count)
            work.append(_Work(*trains, self._outer_step(device, count), *copies))
        return work

    def _outer_step(self, device: Device, count: int) -> Transfer:
        """Return the outer step on `count` values; the device cannot train at the same time."""
        nbytes = _STEP_TRAFFIC * _FLOAT32_NBYTES * count
        if device.kind is DeviceKind.GPU:
            on = (costs.compute_lane(device.name), Resource(device.host, Lane.REDUCE))
            return Transfer(on, Cost(nbytes=nbytes, num_calls=1))
        # On a single-core host, workers take their outer steps one after another. On other hosts
        # they take them in parallel and share the host's memory bandwidth.
        lone_core = costs.lone_core(self.machine.host_of(device))
        shared = 1 if lone_core else self.memory.num_ranks[device.host]
        lanes = (*costs.copy_lanes(device), *lone_core)
        return Transfer(lanes, Cost(nbytes=shared * nbytes, num_calls=1))


def _chain(
    number: int,
    part: str,
    worker: int,
    work: Iterable[tuple[Kind, Transfer | None]],
    before: _Ids,
) -> Generator[Task, None, _Ids]:
    """Yield one task per transfer, in sequence; return the last task, or `before` for no tasks.

    `number`: number of the round. `part`: the fragment. `before`: tasks before the first task.
    """
    for kind, transfer in work:
        if transfer is not None:
            own = TaskId(number, kind, part, worker)
            yield Task(own, *transfer, before)
            before = (own,)
    return before
