"""The plan of strategy host: the host sums gradients while backward goes on (Le et al. 2018, 3.1).

    gpu0 compute   load fwd1 fwd2 fwd3 | bwd3  bwd2  bwd1                |  step
    gpu0 d2h                                 [d2h 0][d2h 1] [d2h 2]
    host reduce                                     [sum 0][sum 1] [sum 2]
    gpu0 h2d                                               [h2d 0][h2d 1] [h2d 2]

A chunk is some layers in the order of backward. It is copied to the host when the last of them has
been computed; the host sums it when all its workers' copies are there; sums of several hosts go
through a ring between them. A worker on cores copies by itself, and reads the result where it is.
A codec encodes these sums (`core.collective`); the first worker of each host does that.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.core.calibration import (
    Line,
    Measurements,
    line_through,
    linked,
    linked_in_ring,
)
from paceline.core.chunks import chunks
from paceline.core.collective import Coding, Collective, check_encodable
from paceline.core.cost import (
    compute_lane,
    copy_lanes,
    d2h_lane,
    exchange_lane,
    h2d_lane,
    reduce_lane,
)
from paceline.core.machine import Device, Machine
from paceline.core.machine import Host as Computer
from paceline.core.plan import Cost, Kind, Plan, Resource, Task, task_name
from paceline.core.step import ComputeStep, after_update
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, Station, Transfer, lanes_of
from paceline.core.workload import Layer, Workload
from paceline.strategies.host.config import Host

_ENCODABLE = (4,)  # bytes: sums are encoded as float32


def plan(workload: Workload, machine: Machine, config: Host, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the machine has fewer devices, or a GPU or another host is not linked, or it is
    not known how fast the hosts are with the codec.
    """
    devices = machine.first_devices(config.workers)
    layers = workload.in_backward_order
    exchanges: tuple[_Exchange, ...] = ()
    if len(devices) > 1:
        ways = _Ways.on(machine, devices, config.codec)
        if ways.coding is not None:
            check_encodable(workload, _ENCODABLE)
        parts = enumerate(chunks(len(layers), config.chunk))
        exchanges = tuple(
            ways.exchange(str(i), [layers[number] for number in part]) for i, part in parts
        )
    work = _Step(ComputeStep(workload, devices), exchanges)
    return Plan(task for step in range(window.num_steps) for task in work.tasks(step))


@dataclass(frozen=True)
class _Exchange:
    """What the exchange of one chunk holds and costs: for all, and for each worker.

    `last_layer` is the one whose gradients complete it, `synced` the cost of its backward with the
    synchronisation that a GPU needs (step B-4-1), `places` the number of each worker's host.
    """

    chunk: str
    last_layer: str
    synced: Cost
    d2h: tuple[Transfer, ...]
    reduce: Transfer
    send: Collective | None
    places: tuple[int, ...]
    h2d: tuple[Transfer | None, ...]

    def tasks(self, step: int) -> Iterator[Task]:
        """Yield the sum, its way to the other hosts, and to the GPUs."""
        workers = range(len(self.d2h))
        after = tuple(task_name(step, Kind.D2H, self.chunk, worker) for worker in workers)
        name, (on, cost) = task_name(step, Kind.REDUCE, self.chunk), self.reduce
        yield Task(name, Kind.REDUCE, on, cost, after, self.chunk)
        if self.send is not None:
            hosts = range(max(self.places) + 1)
            for number in hosts:
                yield from self.send.encodes(step, number, name)
            yield from self.send.tasks(step, [name for _ in hosts])
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
        if self.send is None:
            return task_name(step, Kind.REDUCE, self.chunk)
        return self.send.result(step, self.places[worker])


@dataclass(frozen=True)
class _Step:
    """What every step of the window does, priced once."""

    compute: ComputeStep
    exchanges: tuple[_Exchange, ...]

    def tasks(self, step: int) -> Iterator[Task]:
        workers = self.compute.workers
        for worker in workers:
            yield from self._until_backward(step, worker)
        for exchange in self.exchanges:
            yield from exchange.tasks(step)
        for worker in workers:
            results = [exchange.result(step, worker) for exchange in self.exchanges]
            after = (*results, self.compute.after_backward(step, worker))
            yield self.compute.step_task(step, worker, after)

    def _until_backward(self, step: int, worker: int) -> Iterator[Task]:
        """Yield the computation with the copies to the host, each where a hook begins it."""
        completed = {exchange.last_layer: exchange for exchange in self.exchanges}
        on_gpu = self.compute.devices[worker].kind == "gpu"
        for task in self.compute.tasks(step, worker, after_update(step, worker)):
            exchange = completed.get(task.part) if task.kind is Kind.BACKWARD else None
            if exchange is None:
                yield task
                continue
            yield replace(task, cost=exchange.synced) if on_gpu else task
            chunk, d2h = exchange.chunk, exchange.d2h[worker]
            name = task_name(step, Kind.D2H, chunk, worker)
            yield Task(name, Kind.D2H, d2h.on, d2h.cost, (task.name,), chunk)


@dataclass(frozen=True)
class _Ways:
    """The ways that gradients take on a machine."""

    machine: Machine
    devices: tuple[Device, ...]
    hosts: tuple[Computer, ...]
    num_ranks: Counter[str]
    ring: Ring | None
    coding: Coding | None

    @classmethod
    def on(cls, machine: Machine, devices: tuple[Device, ...], codec: str | None) -> "_Ways":
        hosts = tuple(dict.fromkeys(machine.host_of(device) for device in devices))
        num_ranks = Counter(device.host for device in devices)
        if len(hosts) == 1:
            return cls(machine, devices, hosts, num_ranks, None, None)
        ring = Ring.over(machine, hosts, _cores(devices))
        coding = Coding.by(codec, _encoding(machine, devices)) if codec else None
        return cls(machine, devices, hosts, num_ranks, ring, coding)

    def exchange(self, chunk: str, layers: Sequence[Layer]) -> _Exchange:
        nbytes = sum(layer.gradient_nbytes for layer in layers)
        count = sum(layer.num_parameters for layer in layers)
        send = None
        if self.ring is not None:
            send = Collective.over(self.ring, Kind.SEND, chunk, nbytes, count, self.coding)
        names = [host.name for host in self.hosts]
        return _Exchange(
            chunk=chunk,
            last_layer=layers[-1].name,
            synced=layers[-1].backward + Cost(num_syncs=1),
            d2h=tuple(self._d2h(device, nbytes) for device in self.devices),
            reduce=self._reduce(nbytes),
            send=send,
            places=tuple(names.index(device.host) for device in self.devices),
            h2d=tuple(self._h2d(device, nbytes) for device in self.devices),
        )

    def _d2h(self, device: Device, nbytes: int) -> Transfer:
        """Return a copy to the host; ranks of one host copy at once and share its memory."""
        if device.kind == "cpu":
            shared = 2 * nbytes * self.num_ranks[device.host]
            return Transfer(copy_lanes(device), Cost(nbytes=shared))
        way = self.machine.route(device, self.machine.host_of(device))
        return Transfer((d2h_lane(device.name), *lanes_of(way)), Cost(nbytes=nbytes, num_calls=1))

    def _reduce(self, nbytes: int) -> Transfer:
        """Return the sum on each host: n gradients are read and one is written.

        Hosts sum at the same time, and the one with the most ranks is waited for.
        """
        on: list[Resource] = [reduce_lane(host.name) for host in self.hosts]
        on += [exchange_lane(device.name) for device in self.devices]
        for host in self.hosts:
            link = self.machine.link_within(host.name)
            if link is not None and link.uses_cores:
                on += _cores([device for device in self.devices if device.host == host.name])
        most = max(self.num_ranks.values())
        return Transfer(tuple(on), Cost(nbytes=(most + 1) * nbytes, num_calls=1))

    def _h2d(self, device: Device, nbytes: int) -> Transfer | None:
        if device.kind == "cpu":
            return None
        way = self.machine.route(self.machine.host_of(device), device)
        return Transfer((h2d_lane(device.name), *lanes_of(way)), Cost(nbytes=nbytes, num_calls=1))


def _cores(devices: Sequence[Device]) -> list[Resource]:
    return [compute_lane(device.name) for device in devices if device.kind == "cpu"]


def _encoding(machine: Machine, devices: Sequence[Device]) -> dict[int, Station]:
    """Return the first worker of each host, and whose cores it encodes with."""
    hosts = [device.host for device in devices]
    return {
        worker: device if device.kind == "cpu" else machine.host_of(device)
        for worker, device in enumerate(devices)
        if hosts.index(device.host) == worker
    }


def calibrate(machine: Machine, measured: Measurements, config: Host | None = None) -> Machine:
    """Return the machine whose hosts, and links to them, are as fast as the measured exchanges.

    An exchange has up to three stages that a profile cannot tell apart: copies to the host (cores
    share this one with the sum, both being traffic of one memory), a sum there, copies back; and
    between hosts a fourth. They are taken to be equally long.
    """
    devices, hosts = machine.devices, machine.hosts
    gpus = [device for device in devices if device.kind == "gpu"]
    num_stages = (3 if gpus else 1) + (len(hosts) > 1)
    whole = line_through(measured)
    stage = Line(whole.latency_s / num_stages, whole.seconds_per_byte / num_stages)
    most = max(Counter(device.host for device in devices).values())
    traffic = most + 1 if gpus else 3 * most + 1
    facts = {
        "memory_bandwidth_bytes_per_s": traffic / stage.seconds_per_byte,
        "reduce_latency_s": stage.latency_s,
    }
    as_fast = tuple(host.model_copy(update=facts) for host in hosts)
    faster = machine.model_copy(update={"hosts": as_fast})
    ends: list[tuple[Station, Station]] = [(gpu, machine.host_of(gpu)) for gpu in gpus]
    links = linked(faster, ends or [(host, host) for host in hosts], stage).links
    if len(hosts) > 1:
        faster = linked_in_ring(faster, hosts, stage, config.codec if config else None)
        links += faster.links
    return faster.model_copy(update={"links": links})
