"""The plan of strategy allreduce: bucketed and overlapped as torch's DistributedDataParallel does.

    worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 |          step
    exchange                                      [bucket 0] [bucket 1]

A bucket is reduced when all workers have computed all its gradients; buckets follow one another;
the weight update waits for the last.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.cost import compute_lane, exchange_lane, link_lane
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Hop, Machine
from paceline.core.plan import Cost, Kind, Plan, Resource, Task, task_name
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Workload
from paceline.strategies.allreduce.config import AllReduce

_MIB = 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together; it is complete when `last_layer` has been computed."""

    nbytes: int
    last_layer: str
    num_parameters: int


def buckets(ready: Sequence[Layer], bucket_mb: int | None) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel makes after its first iteration.

    Parameters are taken as their gradients become ready, one group per element size. A bucket is
    closed by the parameter with which it reaches its capacity.
    """
    capacities = [_MIB, 25 * _MIB] if bucket_mb is None else [bucket_mb * _MIB]
    closed: list[Bucket] = []
    open_: dict[int, Bucket] = {}
    num_closed: dict[int, int] = {}
    for layer in ready:
        for parameter in layer.parameters:
            group = parameter.element_size
            bucket = open_.pop(group, Bucket(0, "", 0))
            bucket = Bucket(bucket.nbytes + parameter.nbytes, layer.name, bucket.num_parameters + 1)
            number = num_closed.get(group, 0)
            if bucket.nbytes >= capacities[min(number, len(capacities) - 1)]:
                closed.append(bucket)
                num_closed[group] = number + 1
            else:
                open_[group] = bucket
    return closed + list(open_.values())


def plan(workload: Workload, machine: Machine, config: AllReduce, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the machine has fewer devices or they are not linked.
    """
    devices = machine.devices[: config.workers]
    if len(devices) < config.workers:
        raise InvalidInput(
            f"workers: {config.workers} do not fit on machine {machine.name!r}, "
            f"which has {len(devices)} devices"
        )
    return Plan(
        task
        for work in (_Step.of(workload, machine, devices, config),)
        for step in range(window.num_steps)
        for task in work.tasks(step)
    )


@dataclass(frozen=True)
class _Step:
    """What every step of the window does, priced once."""

    workload: Workload
    devices: tuple[str, ...]
    reductions: tuple[tuple[Bucket, "_Reduction"], ...]
    load: Cost
    update: Cost

    @classmethod
    def of(
        cls, workload: Workload, machine: Machine, devices: Sequence[Device], config: AllReduce
    ) -> "_Step":
        parts = buckets(workload.in_backward_order, config.bucket_mb) if len(devices) > 1 else []
        ring = _Ring.over(machine, devices) if parts else None
        num_tensors = sum(len(layer.parameters) for layer in workload.layers)
        return cls(
            workload,
            tuple(device.name for device in devices),
            tuple((part, ring.reduction(part.nbytes)) for part in parts if ring),
            Cost(nbytes=2 * workload.input_nbytes, num_calls=1),
            # Momentum SGD reads three values for each parameter and writes two.
            Cost(4 * workload.num_parameters, 5 * workload.gradient_nbytes, 2 * num_tensors),
        )

    def tasks(self, step: int) -> Iterator[Task]:
        workers = range(len(self.devices))
        for worker in workers:
            yield from self._compute(step, worker)
        last: tuple[str, ...] = ()
        for i, (bucket, reduction) in enumerate(self.reductions):
            ready = [task_name(step, Kind.BACKWARD, bucket.last_layer, w) for w in workers]
            name = task_name(step, Kind.REDUCE, str(i))
            after = (*last, *ready)
            yield Task(name, Kind.REDUCE, reduction.on, reduction.cost, after, str(i))
            last = (name,)
        for worker in workers:
            first = self.workload.in_backward_order[-1].name
            after = (*last, task_name(step, Kind.BACKWARD, first, worker))
            name = task_name(step, Kind.STEP, worker=worker)
            yield Task(name, Kind.STEP, self._on(worker), self.update, after)

    def _compute(self, step: int, worker: int) -> Iterator[Task]:
        on = self._on(worker)
        name = task_name(step, Kind.LOAD, worker=worker)
        after = (task_name(step - 1, Kind.STEP, worker=worker),) if step else ()
        yield Task(name, Kind.LOAD, on, self.load, after)
        for kind, layers in (
            (Kind.FORWARD, self.workload.layers),
            (Kind.BACKWARD, self.workload.in_backward_order),
        ):
            for layer in layers:
                after, name = (name,), task_name(step, kind, layer.name, worker)
                cost = layer.forward if kind is Kind.FORWARD else layer.backward
                yield Task(name, kind, on, cost, after, layer.name)

    def _on(self, worker: int) -> tuple[Resource, ...]:
        return (compute_lane(self.devices[worker]),)


class _Reduction(NamedTuple):
    """What an all-reduce of a bucket holds, and what it costs."""

    on: tuple[Resource, ...]
    cost: Cost


@dataclass(frozen=True)
class _Ring:
    """A ring all-reduce: each of n workers sends 2 (n - 1) / n of the bytes to the next one.

    Hops that take the same link in the same direction share it. The slowest way between two
    neighbours sets the pace of all: that of a large bucket by its most loaded link, that of a small
    one by its latencies.
    """

    devices: tuple[Device, ...]
    routes: tuple[tuple[Hop, ...], ...]
    load: Mapping[Hop, int]

    @classmethod
    def over(cls, machine: Machine, devices: Sequence[Device]) -> "_Ring":
        routes = tuple(_route(machine, one, other) for one, other in _neighbours(devices))
        load = Counter(hop for route in routes for hop in route)
        return cls(tuple(devices), routes, load)

    def reduction(self, nbytes: int) -> _Reduction:
        """Return what the bucket's all-reduce holds, and its cost on the most loaded link."""
        n = len(self.devices)
        sent, num_messages = 2 * (n - 1) / n * nbytes, 2 * (n - 1)

        def seconds(route: Sequence[Hop]) -> float:
            latency_s = sum(hop.link.latency_s for hop in route)
            return num_messages * latency_s + sent * max(map(self._seconds_per_byte, route))

        route = max(self.routes, key=seconds)
        slowest = max(route, key=self._seconds_per_byte)
        on = [link_lane(hop.source, hop.target) for hop in route]
        on += [exchange_lane(device.name) for device in self.devices]
        if slowest.link.uses_cores:
            on += [compute_lane(device.name) for device in self.devices]
        return _Reduction(tuple(on), Cost(nbytes=sent * self.load[slowest], num_calls=num_messages))

    def _seconds_per_byte(self, hop: Hop) -> float:
        return self.load[hop] / hop.link.bandwidth_bytes_per_s


def _neighbours(devices: Sequence[Device]) -> Iterator[tuple[Device, Device]]:
    return zip(devices, (*devices[1:], devices[0]), strict=True)


def _route(machine: Machine, one: Device, other: Device) -> tuple[Hop, ...]:
    try:
        return machine.route(one, other)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
