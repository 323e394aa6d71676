"""The plan of strategy allreduce: bucketed and overlapped as torch's DistributedDataParallel does.

    worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 |          step
    exchange                                      [bucket 0] [bucket 1]

A bucket is reduced when all workers have computed all its gradients; buckets follow one another;
the weight update waits for the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    ring = _Ring.over(machine, devices) if len(devices) > 1 else None
    parts = buckets(workload.in_backward_order, config.bucket_mb) if ring else []
    tasks: list[Task] = []
    for step in range(window.num_steps):
        tasks += _step(workload, devices, ring, parts, step)
    return Plan(tasks)


def _step(
    workload: Workload,
    devices: Sequence[Device],
    ring: "_Ring | None",
    parts: Sequence[Bucket],
    step: int,
) -> Iterator[Task]:
    workers = range(len(devices))
    for worker in workers:
        yield from _compute(workload, devices[worker].name, step, worker)
    last: tuple[str, ...] = ()
    for i, bucket in enumerate(parts):
        assert ring is not None
        ready = [task_name(step, Kind.BACKWARD, bucket.last_layer, w) for w in workers]
        name = task_name(step, Kind.REDUCE, str(i))
        cost = ring.cost(bucket.nbytes)
        yield Task(name, Kind.REDUCE, ring.on, cost, (*last, *ready), str(i))
        last = (name,)
    for worker in workers:
        yield _update(workload, devices[worker].name, step, worker, last)


def _compute(workload: Workload, device: str, step: int, worker: int) -> Iterator[Task]:
    on = (compute_lane(device),)
    name = task_name(step, Kind.LOAD, worker=worker)
    after = (task_name(step - 1, Kind.STEP, worker=worker),) if step else ()
    yield Task(name, Kind.LOAD, on, Cost(nbytes=2 * workload.input_nbytes, num_calls=1), after)
    for kind, layers in (
        (Kind.FORWARD, workload.layers),
        (Kind.BACKWARD, workload.in_backward_order),
    ):
        for layer in layers:
            after, name = (name,), task_name(step, kind, layer.name, worker)
            cost = layer.forward if kind is Kind.FORWARD else layer.backward
            yield Task(name, kind, on, cost, after, layer.name)


def _update(
    workload: Workload, device: str, step: int, worker: int, reduced: tuple[str, ...]
) -> Task:
    """Return the weight update: momentum SGD reads three values a parameter and writes two."""
    last = task_name(step, Kind.BACKWARD, workload.in_backward_order[-1].name, worker)
    tensors = sum(len(layer.parameters) for layer in workload.layers)
    cost = Cost(4 * workload.num_parameters, 5 * workload.gradient_nbytes, 2 * tensors)
    name = task_name(step, Kind.STEP, worker=worker)
    return Task(name, Kind.STEP, (compute_lane(device),), cost, (*reduced, last))


@dataclass(frozen=True)
class _Ring:
    """A ring all-reduce: each of n workers sends 2 (n - 1) / n of the bytes to the next one.

    Hops that take the same link in the same direction share it; the most loaded link, in seconds
    per byte, sets the pace of all.
    """

    on: tuple[Resource, ...]
    num_workers: int
    num_sharing: int
    num_hops: int

    @classmethod
    def over(cls, machine: Machine, devices: Sequence[Device]) -> "_Ring":
        routes = [_route(machine, one, other) for one, other in _neighbours(devices)]
        load: dict[Hop, int] = {}
        for route in routes:
            for hop in route:
                load[hop] = load.get(hop, 0) + 1
        slowest = max(load, key=lambda hop: load[hop] / hop.link.bandwidth_bytes_per_s)
        on = [link_lane(slowest.source, slowest.target)]
        on += [exchange_lane(device.name) for device in devices]
        if slowest.link.uses_cores:
            on += [compute_lane(device.name) for device in devices]
        return cls(tuple(on), len(devices), load[slowest], max(map(len, routes)))

    def cost(self, nbytes: int) -> Cost:
        """Return the bytes on the most loaded link, and the messages that follow one another."""
        n = self.num_workers
        sent = 2 * (n - 1) / n * nbytes
        return Cost(nbytes=sent * self.num_sharing, num_calls=2 * (n - 1) * self.num_hops)


def _neighbours(devices: Sequence[Device]) -> Iterator[tuple[Device, Device]]:
    return zip(devices, (*devices[1:], devices[0]), strict=True)


def _route(machine: Machine, one: Device, other: Device) -> tuple[Hop, ...]:
    try:
        return machine.route(one, other)
    except ValueError as error:
        raise InvalidInput(str(error)) from None
