"""A step whose gradients are summed in the memory of each host, chunk by chunk.

    gpu0 compute   load fwd1 fwd2 fwd3 | bwd3  bwd2  bwd1                |  step
    gpu0 d2h                                 [d2h 0][d2h 1] [d2h 2]
    host reduce                                     [sum 0][sum 1] [sum 2]
    gpu0 h2d                                               [h2d 0][h2d 1] [h2d 2]

A chunk is some layers in the order of backward. It is copied to the host when the last of them has
been computed; each host sums it when all copies are there. What lies between several hosts' sums
and the copies back is the strategy's. A worker on cores copies by itself, and reads the result
where it is.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from paceline.core.cost import (
    compute_lane,
    copy_lanes,
    d2h_lane,
    exchange_lane,
    h2d_lane,
    reduce_lane,
)
from paceline.core.machine import Device, Host, Machine
from paceline.core.plan import Cost, Kind, Resource, Task, task_name
from paceline.core.step import ComputeStep, after_update
from paceline.core.transfer import Transfer, lanes_of
from paceline.core.workload import Layer


class Between(Protocol):
    """What hosts do with their sums of a chunk."""

    def tasks(self, step: int, summed: str) -> Iterator[Task]:
        """Yield it, from when the task `summed` ended, with which all hosts have their sums."""
        ...

    def result(self, step: int, place: int) -> str:
        """Return the name of the task after which the host of that number has the result."""
        ...


@dataclass(frozen=True)
class ChunkExchange:
    """What the exchange of one chunk holds and costs: for all, and for each worker.

    `last_layer` is the one whose gradients complete it, `synced` the cost of its backward with the
    synchronisation that a GPU needs (Le et al. 2018, step B-4-1), `places` the number of each
    worker's host.
    """

    chunk: str
    last_layer: str
    synced: Cost
    d2h: tuple[Transfer, ...]
    reduce: Transfer
    between: Between | None
    places: tuple[int, ...]
    h2d: tuple[Transfer | None, ...]

    def tasks(self, step: int) -> Iterator[Task]:
        """Yield the sum, its way to the other hosts, and to the GPUs."""
        workers = range(len(self.d2h))
        after = tuple(task_name(step, Kind.D2H, self.chunk, worker) for worker in workers)
        name, (on, cost) = task_name(step, Kind.REDUCE, self.chunk), self.reduce
        yield Task(name, Kind.REDUCE, on, cost, after, self.chunk)
        if self.between is not None:
            yield from self.between.tasks(step, name)
        for worker, h2d in enumerate(self.h2d):
            if h2d is not None:
                name, (on, cost) = self.result(step, worker), h2d
                yield Task(name, Kind.H2D, on, cost, (self._summed(step, worker),), self.chunk)

    def result(self, step: int, worker: int) -> str:
        """Return the name of the task after which a worker has the result."""
        if self.h2d[worker] is not None:
            return task_name(step, Kind.H2D, self.chunk, worker)
        return self._summed(step, worker)

    def _summed(self, step: int, worker: int) -> str:
        """Return the name of the task after which a worker's host has the result."""
        if self.between is None:
            return task_name(step, Kind.REDUCE, self.chunk)
        return self.between.result(step, self.places[worker])


@dataclass(frozen=True)
class HostStep:
    """What every step of the window does, priced once; without exchanges, one worker's.

    `update` is what a weight update costs each worker, if not that of all parameters.
    """

    compute: ComputeStep
    exchanges: tuple[ChunkExchange, ...]
    update: Cost | None = None

    def tasks(self, step: int) -> Iterator[Task]:
        """Yield all tasks of a step."""
        workers = self.compute.workers
        for worker in workers:
            yield from self._until_backward(step, worker)
        for exchange in self.exchanges:
            yield from exchange.tasks(step)
        for worker in workers:
            results = [exchange.result(step, worker) for exchange in self.exchanges]
            after = (*results, self.compute.after_backward(step, worker))
            task = self.compute.step_task(step, worker, after)
            yield task if self.update is None else replace(task, cost=self.update)

    @cached_property
    def _completed(self) -> dict[str, ChunkExchange]:
        return {exchange.last_layer: exchange for exchange in self.exchanges}

    def _until_backward(self, step: int, worker: int) -> Iterator[Task]:
        """Yield the computation with the copies to the host, each where a hook begins it."""
        on_gpu = self.compute.devices[worker].kind == "gpu"
        for task in self.compute.tasks(step, worker, after_update(step, worker)):
            exchange = self._completed.get(task.part) if task.kind is Kind.BACKWARD else None
            if exchange is None:
                yield task
                continue
            yield replace(task, cost=exchange.synced) if on_gpu else task
            chunk, d2h = exchange.chunk, exchange.d2h[worker]
            name = task_name(step, Kind.D2H, chunk, worker)
            yield Task(name, Kind.D2H, d2h.on, d2h.cost, (task.name,), chunk)


@dataclass(frozen=True)
class HostMemory:
    """The hosts of some workers, and the ways to and from their memory."""

    machine: Machine
    devices: tuple[Device, ...]

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The workers' hosts, each once."""
        return tuple(dict.fromkeys(self.machine.host_of(device) for device in self.devices))

    @cached_property
    def num_ranks(self) -> Counter[str]:
        """How many workers each host has."""
        return Counter(device.host for device in self.devices)

    @cached_property
    def _places(self) -> tuple[int, ...]:
        number = {host.name: i for i, host in enumerate(self.hosts)}
        return tuple(number[device.host] for device in self.devices)

    def exchange(
        self, chunk: str, layers: Sequence[Layer], between: Between | None
    ) -> ChunkExchange:
        """Return the exchange of a chunk; InvalidInput if a GPU is not linked to its host."""
        nbytes = sum(layer.gradient_nbytes for layer in layers)
        return ChunkExchange(
            chunk=chunk,
            last_layer=layers[-1].name,
            synced=layers[-1].backward + Cost(num_syncs=1),
            d2h=tuple(self._d2h(device, nbytes) for device in self.devices),
            reduce=self._reduce(nbytes),
            between=between,
            places=self._places,
            h2d=tuple(self._h2d(device, nbytes) for device in self.devices),
        )

    def _d2h(self, device: Device, nbytes: int) -> Transfer:
        """Return a copy to the host; ranks of one host copy at once and share its memory."""
        if device.kind == "cpu":
            return Transfer(
                copy_lanes(device), Cost(nbytes=2 * nbytes * self.num_ranks[device.host])
            )
        way = self.machine.route(device, self.machine.host_of(device))
        return Transfer((d2h_lane(device.name), *lanes_of(way)), Cost(nbytes=nbytes, num_calls=1))

    def _reduce(self, nbytes: int) -> Transfer:
        """Return the sum on each host: n gradients are read and one is written.

        Hosts sum at the same time, and the one with the most ranks is waited for.
        """
        most = max(self.num_ranks.values())
        return Transfer(self._summing, Cost(nbytes=(most + 1) * nbytes, num_calls=1))

    @cached_property
    def _summing(self) -> tuple[Resource, ...]:
        on: list[Resource] = [reduce_lane(host.name) for host in self.hosts]
        on += [exchange_lane(device.name) for device in self.devices]
        for host in self.hosts:
            link = self.machine.link_within(host.name)
            if link is not None and link.uses_cores:
                on += cores([device for device in self.devices if device.host == host.name])
        return tuple(on)

    def _h2d(self, device: Device, nbytes: int) -> Transfer | None:
        if device.kind == "cpu":
            return None
        way = self.machine.route(self.machine.host_of(device), device)
        return Transfer((h2d_lane(device.name), *lanes_of(way)), Cost(nbytes=nbytes, num_calls=1))


def cores(devices: Sequence[Device]) -> list[Resource]:
    """Return what those of the devices that are cores compute on."""
    return [compute_lane(device.name) for device in devices if device.kind == "cpu"]
