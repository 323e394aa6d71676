"""Links between places (hosts, devices and switches, by name), and the routes over them."""

import heapq
import itertools
from collections.abc import Collection, Iterable
from typing import Annotated, NamedTuple

from pydantic import Field

from paceline.core.facts import BytesPerSecond, Fact, Name, Seconds, Source


class Link(Fact):
    """A full-duplex connection: `bandwidth_bytes_per_s` in each direction.

    `share`: attainable fraction of the bandwidth. `rails`: number of parallel links from a
    host to a switch or another host, one for each network adapter; a ring of GPUs uses all rails,
    any other message uses one. `rdma`: whether adapters access the GPUs' memory directly
    (GPUDirect RDMA). `uses_cores`: for a link from a host to itself, whether messages between the
    host's processes keep the ranks' cores busy. If a switch has a link to itself, all messages
    through the switch share the bandwidth of this link.
    """

    between: Annotated[tuple[Name, Name], Field(examples=[["gpu0", "host0"]])]
    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)]
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    rails: Annotated[int, Field(ge=1, le=64)] = 1
    rdma: bool = False
    uses_cores: bool = False
    source: Source

    def __hash__(self) -> int:
        return hash(self.between)

    @property
    def name(self) -> str:
        """The link's name, made of its two ends."""
        return "--".join(self.between)

    @property
    def reached(self) -> "Link":
        """The link with the bandwidth that is attainable: `share` of the nominal bandwidth."""
        if self.share == 1.0:
            return self
        found = self.share * self.bandwidth_bytes_per_s
        return self.model_copy(update={"bandwidth_bytes_per_s": found, "share": 1.0})


class Hop(NamedTuple):
    """One direction of a link."""

    source: str
    target: str
    link: Link


class Network:
    """A graph of places and the links between them; caches routes."""

    def __init__(self, links: Iterable[Link], switches: Collection[str] = ()) -> None:
        self.within: dict[str, Link] = {}  # links from a place to itself
        self._switches = switches
        self._hops: dict[str, list[Hop]] = {}
        self._routes: dict[tuple[str, str], tuple[Hop, ...] | None] = {}
        for link in links:
            one, other = link.between
            if one == other:
                self.within.setdefault(one, link)
            else:
                self._hops.setdefault(one, []).append(Hop(one, other, link))
                self._hops.setdefault(other, []).append(Hop(other, one, link))

    def route(self, start: str, goal: str) -> tuple[Hop, ...] | None:
        """Return the route with the fewest hops between two places; None if there is no route.

        Of equally short routes, chooses the one through the fewest hosts and devices: two devices
        at a switch send through the switch, not through their host. Of these routes, chooses the
        one with the most bandwidth. A switch's link to itself does not count as a hop.
        """
        if (start, goal) in self._routes:
            return self._routes[start, goal]
        heap: list[tuple[int, int, float, int, str, tuple[Hop, ...]]] = [(0, 0, 0.0, 0, start, ())]
        sequence = itertools.count(1)  # breaks ties in favour of the earlier link
        visited: set[str] = set()
        found = None
        while heap:
            num_hops, num_stations, seconds_per_byte, _, place, route = heapq.heappop(heap)
            if place == goal:
                found = route
                break
            if place in visited:
                continue
            visited.add(place)
            if place != start:
                num_stations += place not in self._switches
                route += self._shared(place)
            for hop in self._hops.get(place, ()):
                way = (*route, hop)
                slower = max(seconds_per_byte, *(1 / one.link.bandwidth_bytes_per_s for one in way))
                entry = (num_hops + 1, num_stations, slower, next(sequence), hop.target, way)
                heapq.heappush(heap, entry)
        self._routes[start, goal] = found
        return found

    def reached_from(self, start: str) -> set[str]:
        """Return all places that can be reached from `start`, including `start`."""
        reached, waiting = {start}, [start]
        while waiting:
            for hop in self._hops.get(waiting.pop(), ()):
                if hop.target not in reached:
                    reached.add(hop.target)
                    waiting.append(hop.target)
        return reached

    def _shared(self, place: str) -> tuple[Hop, ...]:
        """Return a switch's link to itself as a hop; an empty tuple if there is none."""
        link = self.within.get(place) if place in self._switches else None
        return () if link is None else (Hop(place, place, link),)
