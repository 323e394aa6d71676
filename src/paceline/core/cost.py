"""Cost models: seconds of tasks, and of layers on a device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, inf
from typing import NamedTuple, Protocol

from paceline.core.machine import Device, DeviceKind, Host, Machine, Station
from paceline.core.plan import COMPUTE, Cost, Kind, Lane, PriceKey, Resource, Task
from paceline.core.wire_format import Kernel
from paceline.core.workload import Workload


class CostModel(Protocol):
    """Predicts the seconds of tasks.

    Must predict the same seconds for tasks that differ only in step, worker and predecessors.
    """

    def seconds(self, task: Task) -> float:
        """Return the seconds for which the task holds its resources."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of a resource, which processes flops and bytes concurrently.

    Each call adds `call_latency_s`. Each synchronisation of a GPU with its host adds
    `sync_latency_s`.
    """

    flops_per_s: float = inf
    nbytes_per_s: float = inf
    call_latency_s: float = 0.0
    sync_latency_s: float = 0.0

    def work_s(self, cost: Cost) -> float:
        """Return the seconds of flops or of bytes, whichever is longer."""
        return max(cost.flops / self.flops_per_s, cost.nbytes / self.nbytes_per_s)

    def latency_s(self, cost: Cost) -> float:
        """Return the latencies of all calls and synchronisations, in seconds."""
        return cost.num_calls * self.call_latency_s + cost.num_syncs * self.sync_latency_s

    def seconds(self, cost: Cost) -> float:
        """Return the seconds of work and latencies."""
        return self.work_s(cost) + self.latency_s(cost)


def compute_lane(device: str) -> Resource:
    """Return the resource that a device holds while it computes."""
    return Resource(device, Lane.COMPUTE)


def exchange_lane(owner: str) -> Resource:
    """Return the resource that makes the exchanges of a device or host run one after another."""
    return Resource(owner, Lane.EXCHANGE)


def link_lane(source: str, target: str) -> Resource:
    """Return the resource that a message from `source` to `target` holds."""
    return Resource(f"{source}->{target}", Lane.WIRE)


def message_lane(host: Host) -> Resource:
    """Return the resource that a host holds while it encrypts, checks and copies a message."""
    return Resource(host.name, Lane.MESSAGES)


def copy_lanes(device: Device) -> tuple[Resource, ...]:
    """Return the resources that a device holds while it copies or adds.

    A CPU device also holds its host's memory, whose bandwidth limits copies.
    """
    lane = compute_lane(device.name)
    return (lane,) if device.kind == DeviceKind.GPU else (lane, Resource(device.name, Lane.MEMORY))


def lone_core(host: Host) -> tuple[Resource, ...]:
    """Return the core of a single-core host; an empty tuple for a host with more cores."""
    return (_core(host, 0),) if host.cores == 1 else ()


def _core(host: Host, number: int) -> Resource:
    return Resource(f"{host.name}/{number}", Lane.CORE)


def computing_on(device: Device, host: Host, devices: Sequence[Device]) -> tuple[Resource, ...]:
    """Return the resources that a device holds while it computes.

    If a host has fewer cores than CPU devices, its devices share the cores. On a single-core host
    a device also shares the core with the threads that handle messages.
    """
    lane = compute_lane(device.name)
    on_cores = [one.name for one in devices if one.host == host.name and one.kind == DeviceKind.CPU]
    if device.name not in on_cores:
        return (lane,)
    if len(on_cores) > host.cores:
        return (lane, _core(host, on_cores.index(device.name) % host.cores))
    return (lane, *lone_core(host))


def core_lanes(devices: Sequence[Device]) -> list[Resource]:
    """Return, for each CPU device, the resource that it holds while it computes."""
    return [compute_lane(device.name) for device in devices if device.kind == DeviceKind.CPU]


def codec_lanes(station: Station, kernel: Kernel, kind: Kind) -> tuple[Resource, ...]:
    """Return the resources that a device or host holds while it encodes or decodes.

    A device cannot compute meanwhile. In the cost of an encoding or decoding task, `flops` is the
    number of values, and `num_calls` is the number of pieces.
    """
    lane = Resource(station.name, Lane(f"{kind} {kernel}"))
    return (compute_lane(station.name), lane) if isinstance(station, Device) else (lane,)


@dataclass(frozen=True)
class Roofline:
    """Predicts a task's seconds: the time of its flops or bytes (the longer), plus latencies.

    The slowest link of a transfer determines the time of its bytes, and each message has the
    latencies of all links. Other resources work concurrently, and the slowest of them determines
    the time. Resources without a rate are ignored. Tasks that send, copy or encode also ignore the
    device's compute rate, because it describes layers. Raises ValueError if no resource of a task
    has a rate.
    """

    rates: Mapping[Resource, Rate]

    @classmethod
    def of(cls, machine: Machine) -> "Roofline":
        """Return the cost model of a machine's hosts, devices, codecs and links."""
        rates = {}
        for host in machine.hosts:
            rates[Resource(host.name, Lane.REDUCE)] = Rate(
                nbytes_per_s=host.memory_bandwidth_bytes_per_s, call_latency_s=host.reduce_latency_s
            )
            if host.message_bytes_per_s is not None:
                rates[message_lane(host)] = Rate(nbytes_per_s=host.message_bytes_per_s)
        for device in machine.devices:
            computing, *memory = copy_lanes(device)
            rates[computing] = Rate(
                device.flops_per_s,
                device.memory_bandwidth_bytes_per_s,
                device.call_latency_s,
                device.call_latency_s if device.sync_latency_s is None else device.sync_latency_s,
            )
            for lane in memory:  # only CPU devices: a GPU copies within its own memory
                nbytes_per_s = machine.host_of(device).memory_bandwidth_bytes_per_s
                rates[lane] = Rate(nbytes_per_s=nbytes_per_s)
        stations: list[Station] = [*machine.hosts, *machine.devices]
        for station in stations:
            for kernel, speed in station.codecs.items():
                for kind, values_per_s in (
                    (Kind.ENCODE, speed.encode_values_per_s),
                    (Kind.DECODE, speed.decode_values_per_s),
                ):
                    rate = Rate(flops_per_s=values_per_s, call_latency_s=speed.latency_s)
                    rates[codec_lanes(station, kernel, kind)[-1]] = rate
        for link in machine.links:
            one, other = link.between
            rate = Rate(nbytes_per_s=link.bandwidth_bytes_per_s, call_latency_s=link.latency_s)
            rates[link_lane(one, other)] = rates[link_lane(other, one)] = rate
        return cls(rates)

    def seconds(self, task: Task) -> float:
        """Return the seconds for which the task holds its resources."""
        on, cost = task.on, task.cost
        found = self._paces.get(on)
        if found is None:
            found = self._paces[on] = self._pace(on)
        rates, is_on_wire = found
        if len(rates) == 1:  # fast path for most tasks
            return rates[0].seconds(cost)
        if not rates:
            raise ValueError(f"{task.name}: no rate is known for any of {[str(r) for r in on]}")
        if is_on_wire:
            # The slowest hop determines the time of the bytes; the latencies of all hops add up.
            work_s = max(rate.work_s(cost) for rate in rates)
            return work_s + sum(rate.latency_s(cost) for rate in rates)
        return max(rate.seconds(cost) for rate in rates)

    @cached_property
    def _paces(self) -> dict[tuple[Resource, ...], tuple[tuple[Rate, ...], bool]]:
        """Cached results of `_pace`: thousands of tasks use only a few sets of resources."""
        return {}

    def _pace(self, on: tuple[Resource, ...]) -> tuple[tuple[Rate, ...], bool]:
        """Return the rates that limit tasks on these resources, and whether links limit them."""
        held = [resource for resource in on if resource in self.rates]
        links = tuple(self.rates[resource] for resource in held if resource.lane is Lane.WIRE)
        # Ignore the device's compute rate if the task copies or encodes (see the class).
        beside = [resource for resource in held if resource.lane is not Lane.COMPUTE]
        return links or tuple(self.rates[resource] for resource in beside or held), bool(links)


@dataclass(frozen=True)
class ProfiledCost:
    """Predicts a task's seconds by the durations that a profile measured.

    `otherwise`: cost model for tasks that were not measured. If a plan adds synchronisations of a
    GPU with its host to a measured task, `otherwise` also predicts their seconds.
    """

    durations: Mapping[PriceKey, float]
    otherwise: CostModel

    def seconds(self, task: Task) -> float:
        """Return the task's measured seconds; if not measured, those of `otherwise`."""
        measured = self.durations.get(task.price_key)
        if measured is None:
            return self.otherwise.seconds(task)
        if task.cost.num_syncs:
            alone = task._replace(cost=Cost(num_syncs=task.cost.num_syncs))
            measured += self.otherwise.seconds(alone)
        return measured


@dataclass(frozen=True)
class Slowed:
    """Multiplies the seconds that `model` predicts for computing tasks by `factor`."""

    model: CostModel
    factor: float

    def seconds(self, task: Task) -> float:
        """Return the seconds for which the task holds its resources."""
        seconds = self.model.seconds(task)
        return seconds * self.factor if task.kind in COMPUTE else seconds


class Totals(NamedTuple):
    """Total seconds of each phase of a step; None if unknown."""

    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None


UNSCALED = Totals()


class LayerTimes(NamedTuple):
    """Seconds of each layer's forward and backward passes, in forward order, and of the update."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float


def layer_times(workload: Workload, rate: Rate, totals: Totals = UNSCALED) -> LayerTimes:
    """Predict the seconds of each layer on a device with the given rate.

    If `totals` has the seconds of a phase, scales the layers' seconds in this phase so that they
    add up to the total. A device's rate is `Roofline.of(machine).rates[compute_lane(device.name)]`.
    Raises ValueError if a phase has a positive total, but no layer takes time in this phase.
    """

    def seconds(phase: str, costs: Iterable[Cost], total_s: float | None) -> tuple[float, ...]:
        times = tuple(map(rate.seconds, costs))
        if total_s is None:
            return times
        now_s = fsum(times)
        if not now_s and total_s:
            raise ValueError(f"{phase}: must be 0 s, because no layer takes time (got {total_s})")
        return tuple(time * total_s / now_s if now_s else 0.0 for time in times)

    layers = workload.layers
    return LayerTimes(
        seconds("forward", (layer.forward for layer in layers), totals.forward_s),
        seconds("backward", (layer.backward for layer in layers), totals.backward_s),
        *seconds("update", [update_cost(workload)], totals.update_s),
    )


def update_cost(workload: Workload) -> Cost:
    """Return the cost of a momentum SGD update, which reads three values and writes two."""
    num_tensors = sum(len(layer.parameters) for layer in workload.layers)
    return Cost(4 * workload.num_parameters, 5 * workload.gradient_nbytes, 2 * num_tensors)


@dataclass(frozen=True)
class PacedDevice:
    """The device emulated by a rehearsal, which is a training in which layers only wait.

    `label`: the device's name in messages such as "paced as k40-gigabit/gpu0". `totals`: known
    seconds of whole phases, to which the layers' times are scaled.
    """

    label: str
    rate: Rate
    kind: DeviceKind
    totals: Totals = UNSCALED

    def times(self, workload: Workload) -> LayerTimes:
        """Return each layer's seconds on the device; `workload`: one worker's part of a step."""
        return layer_times(workload, self.rate, self.totals)
