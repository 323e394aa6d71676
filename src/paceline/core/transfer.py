"""What messages hold and cost: one from place to place, and those of a ring all-reduce."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.cost import exchange_lane, link_lane
from paceline.core.machine import Device, Hop, Host, Machine
from paceline.core.plan import Cost, Resource

Station = Device | Host


class Transfer(NamedTuple):
    """What a transfer holds, and what it costs."""

    on: tuple[Resource, ...]
    cost: Cost


def lanes_of(route: Sequence[Hop]) -> tuple[Resource, ...]:
    """Return the directions of links that a message on this way holds."""
    return tuple(link_lane(hop.source, hop.target) for hop in route)


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce: each of n stations sends 2 (n - 1) / n of the bytes to the next one.

    Hops that take the same link in the same direction share it. The slowest way between two
    neighbours sets the pace of all: that of a large bucket by its most loaded link, that of a small
    one by its latencies. `cores` are the lanes that it holds where a link uses them.
    """

    stations: tuple[str, ...]
    routes: tuple[tuple[Hop, ...], ...]
    load: Mapping[Hop, int]
    cores: tuple[Resource, ...]

    @classmethod
    def over(
        cls, machine: Machine, stations: Sequence[Station], cores: Sequence[Resource]
    ) -> "Ring":
        """Return the ring over two or more stations; InvalidInput if they are not linked."""
        routes = tuple(machine.route(one, other) for one, other in neighbours(stations))
        load = Counter(hop for route in routes for hop in route)
        return cls(tuple(station.name for station in stations), routes, load, tuple(cores))

    def reduction(self, nbytes: float) -> Transfer:
        """Return what an all-reduce of so many bytes holds, and its cost on the busiest link."""
        n = len(self.stations)
        sent, num_messages = 2 * (n - 1) / n * nbytes, 2 * (n - 1)
        route = max(self.routes, key=lambda route: self._seconds_on(route, nbytes))
        slowest = max(route, key=self._seconds_per_byte)
        on = lanes_of(route) + tuple(exchange_lane(name) for name in self.stations)
        if slowest.link.uses_cores:
            on += self.cores
        return Transfer(on, Cost(nbytes=sent * self.load[slowest], num_calls=num_messages))

    def seconds(self, nbytes: float) -> float:
        """Return how long an all-reduce of so many bytes takes."""
        return max(self._seconds_on(route, nbytes) for route in self.routes)

    def _seconds_on(self, route: Sequence[Hop], nbytes: float) -> float:
        n = len(self.stations)
        latency_s = sum(hop.link.latency_s for hop in route)
        seconds_per_byte = max(map(self._seconds_per_byte, route))
        return 2 * (n - 1) * (latency_s + nbytes / n * seconds_per_byte)

    def _seconds_per_byte(self, hop: Hop) -> float:
        return self.load[hop] / hop.link.bandwidth_bytes_per_s


def neighbours(stations: Sequence[Station]) -> list[tuple[Station, Station]]:
    """Return each station of a ring with the next one."""
    return list(zip(stations, (*stations[1:], stations[0]), strict=True))
