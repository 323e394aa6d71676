"""What messages hold and cost: one from place to place, and those of a ring all-reduce."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.core.cost import exchange_lane, link_lane
from paceline.core.machine import Hop, Machine, Station
from paceline.core.plan import Cost, Resource


class Transfer(NamedTuple):
    """What a transfer holds, and what it costs."""

    on: tuple[Resource, ...]
    cost: Cost


def lanes_of(route: Sequence[Hop]) -> tuple[Resource, ...]:
    """Return the directions of links that a message on this way holds."""
    return tuple(link_lane(hop.source, hop.target) for hop in route)


def seconds_per_byte(route: Sequence[Hop], load: Mapping[Hop, int]) -> float:
    """Return what a byte takes on the slowest hop, if so many messages share each."""
    return max(load[hop] / hop.link.bandwidth_bytes_per_s for hop in route)


def shared(route: Sequence[Hop], load: Mapping[Hop, int], nbytes: float) -> float:
    """Return the bytes that take as long on the way alone as `nbytes` do on its shared hops."""
    slowest = max(route, key=lambda hop: load[hop] / hop.link.bandwidth_bytes_per_s)
    narrowest = min(hop.link.bandwidth_bytes_per_s for hop in route)
    return nbytes * load[slowest] * (narrowest / slowest.link.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce: each of n ranks sends 2 (n - 1) / n of the bytes to the next one.

    Hops that take the same link in the same direction share it. The slowest way between two
    neighbours sets the pace of all: that of a large bucket by its most loaded link, that of a small
    one by its latencies. `held` are the exchange lanes of the plan's stations, which may stand for
    more of the `num_ranks`; `cores` are the lanes that it holds where a link uses them.
    """

    num_ranks: int
    routes: tuple[tuple[Hop, ...], ...]
    load: Mapping[Hop, int]
    held: tuple[Resource, ...]
    cores: tuple[Resource, ...]

    @classmethod
    def over(
        cls, machine: Machine, stations: Sequence[Station], cores: Sequence[Resource]
    ) -> "Ring":
        """Return the ring over two or more stations; InvalidInput if they are not linked."""
        peers = machine.peers(stations)
        routes = tuple(machine.route(one, other) for one, other in neighbours(peers.stations))
        load = Counter(hop for route in routes for hop in route)
        held = tuple(exchange_lane(station.name) for station in stations)
        return cls(peers.num_ranks, routes, load, held, tuple(cores))

    def reduction(self, nbytes: float) -> Transfer:
        """Return what an all-reduce of so many bytes holds, and its cost on the slowest way."""
        n = self.num_ranks
        sent, num_messages = 2 * (n - 1) / n * nbytes, 2 * (n - 1)
        route = max(self._kinds, key=lambda kind: self._seconds_on(kind, nbytes)).route
        on = lanes_of(route) + self.held
        slowest = max(route, key=lambda hop: self.load[hop] / hop.link.bandwidth_bytes_per_s)
        if slowest.link.uses_cores:
            on += self.cores
        cost = Cost(nbytes=shared(route, self.load, sent), num_calls=num_messages)
        return Transfer(on, cost)

    def seconds(self, nbytes: float) -> float:
        """Return how long an all-reduce of so many bytes takes."""
        return max(self._seconds_on(kind, nbytes) for kind in self._kinds)

    @cached_property
    def _kinds(self) -> tuple["_Way", ...]:
        """The first way of each kind: a large ring has few of them, and is asked many times."""
        kinds: dict[tuple[float, float], _Way] = {}
        for route in self.routes:
            latency_s = sum(hop.link.latency_s for hop in route)
            pace = seconds_per_byte(route, self.load)
            kinds.setdefault((latency_s, pace), _Way(route, latency_s, pace))
        return tuple(kinds.values())

    def _seconds_on(self, way: "_Way", nbytes: float) -> float:
        n = self.num_ranks
        return 2 * (n - 1) * (way.latency_s + nbytes / n * way.seconds_per_byte)


class _Way(NamedTuple):
    route: tuple[Hop, ...]
    latency_s: float
    seconds_per_byte: float


def neighbours(stations: Sequence[Station]) -> list[tuple[Station, Station]]:
    """Return each station of a ring with the next one."""
    return list(zip(stations, (*stations[1:], stations[0]), strict=True))
