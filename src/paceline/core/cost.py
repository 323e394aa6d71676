"""Cost models: what a task costs in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from paceline.core.machine import Machine
from paceline.core.plan import Kind, Resource, Task

_WIRE = "wire"


class CostModel(Protocol):
    """Prices tasks by their kind, part, resources and cost: tasks equal in these cost the same."""

    def seconds(self, task: Task) -> float:
        """Return how long the task holds its resources."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a resource works: flops and bytes in parallel, each call's latency before them."""

    flops_per_s: float = inf
    nbytes_per_s: float = inf
    call_latency_s: float = 0.0


def compute_lane(device: str) -> Resource:
    """Return the lane on which a device computes."""
    return Resource(device, "compute")


def exchange_lane(device: str) -> Resource:
    """Return the lane on which a device's transfers follow one another."""
    return Resource(device, "exchange")


def link_lane(source: str, target: str) -> Resource:
    """Return one direction of a link."""
    return Resource(f"{source}->{target}", _WIRE)


@dataclass(frozen=True)
class Roofline:
    """A task takes as long as the slower of its arithmetic and its traffic, plus its latencies.

    Of all links that a transfer holds, the slowest sets the pace of its bytes, and each message
    pays all their latencies. A resource without a rate is only held, and so is a device beside a
    link: the bytes are those on the wire, not its memory traffic. Raises ValueError for a task that
    holds no resource with a rate.
    """

    rates: Mapping[Resource, Rate]

    @classmethod
    def of(cls, machine: Machine) -> "Roofline":
        """Return the model of a machine's devices and links."""
        rates = {
            compute_lane(device.name): Rate(
                device.flops_per_s, device.memory_bandwidth_bytes_per_s, device.call_latency_s
            )
            for device in machine.devices
        }
        for link in machine.links:
            one, other = link.between
            rate = Rate(nbytes_per_s=link.bandwidth_bytes_per_s, call_latency_s=link.latency_s)
            rates[link_lane(one, other)] = rates[link_lane(other, one)] = rate
        return cls(rates)

    def seconds(self, task: Task) -> float:
        """Return how long the task holds its resources."""
        held = [resource for resource in task.on if resource in self.rates]
        links = [resource for resource in held if resource.lane == _WIRE]
        rates = [self.rates[resource] for resource in links or held]
        if not rates:
            raise ValueError(f"{task.name}: none of {[str(r) for r in task.on]} has a rate")
        cost = task.cost
        arithmetic_s = max(cost.flops / rate.flops_per_s for rate in rates)
        traffic_s = max(cost.nbytes / rate.nbytes_per_s for rate in rates)
        latency_s = cost.num_calls * sum(rate.call_latency_s for rate in rates)
        return max(arithmetic_s, traffic_s) + latency_s


@dataclass(frozen=True)
class Measured:
    """Prices from a profile: (owner of the first resource, kind, part) -> seconds.

    What was not measured is priced by `otherwise`.
    """

    durations: Mapping[tuple[str, Kind, str], float]
    otherwise: CostModel = field(default_factory=lambda: Roofline({}))

    def seconds(self, task: Task) -> float:
        """Return the measured time of this work on this device."""
        measured = self.durations.get((task.on[0].owner, task.kind, task.part))
        return self.otherwise.seconds(task) if measured is None else measured
