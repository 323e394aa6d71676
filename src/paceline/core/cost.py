"""Cost models: the seconds that tasks take, and those of each layer on a device."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum, inf
from typing import NamedTuple, Protocol

from paceline.core.machine import Device, DeviceKind, Host, Machine, Station
from paceline.core.plan import COMPUTE, Cost, Kind, Lane, PriceKey, Resource, Task, TaskId
from paceline.core.wire_format import Kernel
from paceline.core.workload import Workload


class CostModel(Protocol):
    """Prices tasks by their kind, part, resources and cost: tasks equal in these cost the same."""

    def seconds(self, task: Task) -> float:
        """Return the seconds for which the task holds its resources."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """The speed of a resource: flops and bytes in parallel, each call's latency before them.

    Each synchronisation with the host follows them.
    """

    flops_per_s: float = inf
    nbytes_per_s: float = inf
    call_latency_s: float = 0.0
    sync_latency_s: float = 0.0

    def work_s(self, cost: Cost) -> float:
        """Return the seconds of the flops and the bytes."""
        return max(cost.flops / self.flops_per_s, cost.nbytes / self.nbytes_per_s)

    def latency_s(self, cost: Cost) -> float:
        """Return the seconds of the calls and the synchronisations."""
        return cost.num_calls * self.call_latency_s + cost.num_syncs * self.sync_latency_s


def compute_lane(device: str) -> Resource:
    """Return the lane on which a device computes."""
    return Resource(device, Lane.COMPUTE)


def exchange_lane(owner: str) -> Resource:
    """Return the lane on which a device's, or a host's, exchanges follow one another."""
    return Resource(owner, Lane.EXCHANGE)


def link_lane(source: str, target: str) -> Resource:
    """Return one direction of a link."""
    return Resource(f"{source}->{target}", Lane.WIRE)


def message_lane(host: Host) -> Resource:
    """Return the lane on which the messages of a host's hubs follow one another."""
    return Resource(host.name, Lane.MESSAGES)


def copy_lanes(device: Device) -> tuple[Resource, ...]:
    """Return the resources that a device holds while it only copies or adds.

    Cores then are as fast as their host's memory, and not as they are in layers.
    """
    lane = compute_lane(device.name)
    return (lane,) if device.kind == DeviceKind.GPU else (lane, Resource(device.name, Lane.MEMORY))


def lone_core(host: Host) -> tuple[Resource, ...]:
    """Return the only core of a host, on which all of its processes take turns; else nothing."""
    return (_core(host, 0),) if host.cores == 1 else ()


def _core(host: Host, number: int) -> Resource:
    return Resource(f"{host.name}/{number}", Lane.CORE)


def computing_on(device: Device, host: Host, devices: Sequence[Device]) -> tuple[Resource, ...]:
    """Return the resources that a device of the host holds while it computes.

    Of `devices` those on the host's cores share them, if there are more of them than cores; a lone
    core has messages to handle, too.
    """
    lane = compute_lane(device.name)
    on_cores = [one.name for one in devices if one.host == host.name and one.kind == DeviceKind.CPU]
    if device.name not in on_cores:
        return (lane,)
    if len(on_cores) > host.cores:
        return (lane, _core(host, on_cores.index(device.name) % host.cores))
    return (lane, *lone_core(host))


def core_lanes(devices: Sequence[Device]) -> list[Resource]:
    """Return the compute lanes of those devices that are CPU cores."""
    return [compute_lane(device.name) for device in devices if device.kind == DeviceKind.CPU]


def codec_lanes(station: Station, kernel: Kernel, kind: Kind) -> tuple[Resource, ...]:
    """Return the resources of a device, or a host of GPUs, while it encodes or decodes.

    What a device encodes with is what it computes with. `Cost.flops` are the values, and
    `Cost.num_calls` the pieces.
    """
    lane = Resource(station.name, Lane(f"{kind} {kernel}"))
    return (compute_lane(station.name), lane) if isinstance(station, Device) else (lane,)


@dataclass(frozen=True)
class Roofline:
    """A task takes as long as the slower of its arithmetic and its traffic, plus its latencies.

    Of all links that a transfer holds, the slowest sets the pace of its bytes, and each message
    pays all their latencies. Of other resources, which work side by side, the slowest counts. A
    resource without a rate is only held. So is a device beside a link, a memory or a codec: the
    bytes are those on the wire, or of a copy or a sum, and not the traffic of a layer. Raises
    ValueError for a task that holds no resource with a rate.
    """

    rates: Mapping[Resource, Rate]

    @classmethod
    def of(cls, machine: Machine) -> "Roofline":
        """Return the model of a machine's hosts, devices and links."""
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
            for lane in memory:  # of a GPU none: it copies in its own
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
        if not rates:
            raise ValueError(f"{task.name}: none of {[str(r) for r in on]} has a rate")
        if len(rates) == 1:  # as for most tasks: the sums below take three times as long
            return rates[0].work_s(cost) + rates[0].latency_s(cost)
        if is_on_wire:
            # Hops pipeline the bytes of a message: the slowest sets the pace, latencies add up.
            work_s = max(rate.work_s(cost) for rate in rates)
            return work_s + sum(rate.latency_s(cost) for rate in rates)
        return max(rate.work_s(cost) + rate.latency_s(cost) for rate in rates)

    @cached_property
    def _paces(self) -> dict[tuple[Resource, ...], tuple[tuple[Rate, ...], bool]]:
        """What `_pace` found: a plan has thousands of tasks, and few sets of resources."""
        return {}

    def _pace(self, on: tuple[Resource, ...]) -> tuple[tuple[Rate, ...], bool]:
        """Return the rates that set the pace of tasks on these resources; True if of links."""
        held = [resource for resource in on if resource in self.rates]
        links = tuple(self.rates[resource] for resource in held if resource.lane is Lane.WIRE)
        # Beside a memory or a codec a device is only held: the bytes are not those of a layer.
        beside = [resource for resource in held if resource.lane is not Lane.COMPUTE]
        return links or tuple(self.rates[resource] for resource in beside or held), bool(links)


@dataclass(frozen=True)
class ProfiledCost:
    """Prices from a profile, in seconds.

    What was not measured is priced by `otherwise`. So are synchronisations, which are the plan's
    addition to the work that was measured.
    """

    durations: Mapping[PriceKey, float]
    otherwise: CostModel = field(default_factory=lambda: Roofline({}))

    def seconds(self, task: Task) -> float:
        """Return the measured time of this work on this device."""
        measured = self.durations.get(task.price_key)
        if measured is None:
            return self.otherwise.seconds(task)
        if task.cost.num_syncs:
            alone = task._replace(cost=Cost(num_syncs=task.cost.num_syncs))
            measured += self.otherwise.seconds(alone)
        return measured


@dataclass(frozen=True)
class Slowed:
    """Prices by which computation takes `factor` times as long as by `model`."""

    model: CostModel
    factor: float

    def seconds(self, task: Task) -> float:
        """Return the seconds for which the task holds its resources."""
        seconds = self.model.seconds(task)
        return seconds * self.factor if task.kind in COMPUTE else seconds


class Totals(NamedTuple):
    """Seconds of a step's phases, as papers and profiles give them; None where unknown."""

    forward_s: float | None = None
    backward_s: float | None = None
    update_s: float | None = None


UNSCALED = Totals()


class LayerTimes(NamedTuple):
    """Seconds of each layer, both ways in forward order, and of the weight update."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float


def layer_times(workload: Workload, rate: Rate, totals: Totals = UNSCALED) -> LayerTimes:
    """Return the seconds of each layer on a device of that rate, priced as `Roofline` does.

    Where a phase has a total, its layers keep their proportions and are scaled to it. A device's
    rate is `Roofline.of(machine).rates[compute_lane(device.name)]`. ValueError for a negative
    total, and for a phase that costs nothing but should take time.
    """
    lane = compute_lane(workload.name)
    roofline = Roofline({lane: rate})

    def seconds(kind: Kind, costs: Iterable[Cost], total_s: float | None) -> tuple[float, ...]:
        times = [roofline.seconds(Task(TaskId(0, kind), (lane,), cost)) for cost in costs]
        if total_s is None:
            return tuple(times)
        phase, now_s = "update" if kind is Kind.STEP else kind, fsum(times)
        if total_s < 0:
            raise ValueError(f"{phase}: a phase cannot take {total_s} s")
        if not now_s and total_s:
            raise ValueError(
                f"{phase}: {total_s} s cannot be shared among layers that cost nothing at this rate"
            )
        return tuple(time * total_s / now_s if now_s else 0.0 for time in times)

    layers = workload.layers
    return LayerTimes(
        seconds(Kind.FORWARD, (layer.forward for layer in layers), totals.forward_s),
        seconds(Kind.BACKWARD, (layer.backward for layer in layers), totals.backward_s),
        *seconds(Kind.STEP, [update_cost(workload)], totals.update_s),
    )


def update_cost(workload: Workload) -> Cost:
    """Return the work of a weight update: momentum SGD reads three values and writes two."""
    num_tensors = sum(len(layer.parameters) for layer in workload.layers)
    return Cost(4 * workload.num_parameters, 5 * workload.gradient_nbytes, 2 * num_tensors)


@dataclass(frozen=True)
class PacedDevice:
    """The device that a rehearsal's layers are paced as, with totals of phases if they are known.

    `label` names it as in "paced as k40-gigabit/gpu0".
    """

    label: str
    rate: Rate
    kind: DeviceKind
    totals: Totals = UNSCALED

    def times(self, workload: Workload) -> LayerTimes:
        """Return the seconds of each layer of a worker's part of a step on the device."""
        return layer_times(workload, self.rate, self.totals)
