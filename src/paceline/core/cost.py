"""Cost models: what a task costs in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from paceline.core.machine import Device, Host, Machine
from paceline.core.plan import Cost, Kind, Resource, Task
from paceline.core.wire_format import Kernel

_COMPUTE, _WIRE, _MEMORY, _REDUCE = "compute", "wire", "memory", "reduce"


class CostModel(Protocol):
    """Prices tasks by their kind, part, resources and cost: tasks equal in these cost the same."""

    def seconds(self, task: Task) -> float:
        """Return how long the task holds its resources."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a resource works: flops and bytes in parallel, each call's latency before them.

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
    return Resource(device, _COMPUTE)


def exchange_lane(owner: str) -> Resource:
    """Return the lane on which a device's, or a host's, exchanges follow one another."""
    return Resource(owner, "exchange")


def upload_lane(device: str) -> Resource:
    """Return the lane on which what a device sends to a server follows one another."""
    return Resource(device, "upload")


def download_lane(device: str) -> Resource:
    """Return the lane on which what a device gets from a server follows one another."""
    return Resource(device, "download")


def d2h_lane(gpu: str) -> Resource:
    """Return the lane on which a GPU's copies to its host follow one another."""
    return Resource(gpu, "d2h")


def h2d_lane(gpu: str) -> Resource:
    """Return the lane on which a GPU's copies from its host follow one another."""
    return Resource(gpu, "h2d")


def reduce_lane(host: str) -> Resource:
    """Return the lane on which a host's sums of gradients follow one another."""
    return Resource(host, _REDUCE)


def link_lane(source: str, target: str) -> Resource:
    """Return one direction of a link."""
    return Resource(f"{source}->{target}", _WIRE)


def copy_lanes(device: Device) -> tuple[Resource, ...]:
    """Return what a device holds while it only copies or adds.

    Cores then are as fast as their host's memory, and not as they are in layers.
    """
    lane = compute_lane(device.name)
    return (lane,) if device.kind == "gpu" else (lane, Resource(device.name, _MEMORY))


def codec_lanes(station: Device | Host, kernel: Kernel, kind: Kind) -> tuple[Resource, ...]:
    """Return what a device, or the cores of a host of GPUs, hold while they encode or decode.

    What a device encodes with is what it computes with. `Cost.flops` are the values, and
    `Cost.num_calls` the pieces.
    """
    lane = Resource(station.name, f"{kind.value} {kernel}")
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
        rates = {
            reduce_lane(host.name): Rate(
                nbytes_per_s=host.memory_bandwidth_bytes_per_s, call_latency_s=host.reduce_latency_s
            )
            for host in machine.hosts
        }
        for host in machine.hosts:
            rates |= _codec_rates_of(host)
        for device in machine.devices:
            rates |= _rates_of(device, machine) | _codec_rates_of(device)
        for link in machine.links:
            one, other = link.between
            rate = Rate(nbytes_per_s=link.bandwidth_bytes_per_s, call_latency_s=link.latency_s)
            rates[link_lane(one, other)] = rates[link_lane(other, one)] = rate
        return cls(rates)

    def seconds(self, task: Task) -> float:
        """Return how long the task holds its resources."""
        held = [resource for resource in task.on if resource in self.rates]
        if not held:
            raise ValueError(f"{task.name}: none of {[str(r) for r in task.on]} has a rate")
        links = [self.rates[resource] for resource in held if resource.lane == _WIRE]
        if links:
            work_s = max(rate.work_s(task.cost) for rate in links)
            return work_s + sum(rate.latency_s(task.cost) for rate in links)
        beside = [resource for resource in held if resource.lane != _COMPUTE]
        rates = [self.rates[resource] for resource in beside or held]
        return max(rate.work_s(task.cost) + rate.latency_s(task.cost) for rate in rates)


def _rates_of(device: Device, machine: Machine) -> dict[Resource, Rate]:
    sync_s = device.call_latency_s if device.sync_latency_s is None else device.sync_latency_s
    computing = Rate(
        device.flops_per_s, device.memory_bandwidth_bytes_per_s, device.call_latency_s, sync_s
    )
    memory = Rate(nbytes_per_s=machine.host_of(device).memory_bandwidth_bytes_per_s)
    rates = {lane: memory for lane in copy_lanes(device) if lane.lane == _MEMORY}
    return rates | {compute_lane(device.name): computing}


def _codec_rates_of(station: Device | Host) -> dict[Resource, Rate]:
    rates = {}
    for kernel, speed in station.codecs.items():
        for kind, values_per_s in (
            (Kind.ENCODE, speed.encode_values_per_s),
            (Kind.DECODE, speed.decode_values_per_s),
        ):
            rates[codec_lanes(station, kernel, kind)[-1]] = Rate(
                flops_per_s=values_per_s, call_latency_s=speed.latency_s
            )
    return rates


@dataclass(frozen=True)
class Measured:
    """Prices from a profile: (owner of the first resource, kind, part) -> seconds.

    What was not measured is priced by `otherwise`. So are synchronisations, which are the plan's
    addition to the work that was measured.
    """

    durations: Mapping[tuple[str, Kind, str], float]
    otherwise: CostModel = field(default_factory=lambda: Roofline({}))

    def seconds(self, task: Task) -> float:
        """Return the measured time of this work on this device."""
        measured = self.durations.get((task.on[0].owner, task.kind, task.part))
        if measured is None:
            return self.otherwise.seconds(task)
        if task.cost.num_syncs:
            alone = replace(task, cost=Cost(num_syncs=task.cost.num_syncs))
            measured += self.otherwise.seconds(alone)
        return measured
