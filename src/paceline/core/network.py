"""Links, and the ways over them."""

import heapq
import itertools
from collections.abc import Collection, Iterable
from typing import Annotated, NamedTuple

from pydantic import Field

from paceline.core.facts import Fact, Name, Source
from paceline.core.units import BytesPerSecond, Seconds


class Link(Fact):
    """A full-duplex connection: `bandwidth_bytes_per_s` in each direction.

    Between a host and itself it is what processes on that host exchange messages through. There the
    processors carry the bytes, so that `uses_cores` says whether the ranks' devices are busy
    meanwhile.
    """

    between: Annotated[tuple[Name, Name], Field(examples=[["gpu0", "host0"]])]
    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)]
    uses_cores: bool = False
    source: Source

    def __hash__(self) -> int:
        return hash(self.between)

    @property
    def name(self) -> str:
        """The two ends, joined."""
        return "--".join(self.between)


class Hop(NamedTuple):
    """A link taken in one direction."""

    source: str
    target: str
    link: Link


class Network:
    """Some links by their ends. A way is looked for once, however many messages take it."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._within: dict[str, Link] = {}
        self._hops: dict[str, list[Hop]] = {}
        self._ways: dict[tuple[str, str], tuple[Hop, ...] | None] = {}
        for link in links:
            one, other = link.between
            if one == other:
                self._within.setdefault(one, link)
            else:
                self._hops.setdefault(one, []).append(Hop(one, other, link))
                self._hops.setdefault(other, []).append(Hop(other, one, link))

    @property
    def linked(self) -> Collection[str]:
        """All places that have a link with another one."""
        return self._hops.keys()

    def within(self, place: str) -> Link | None:
        """Return the link of a place with itself."""
        return self._within.get(place)

    def way(self, start: str, goal: str) -> tuple[Hop, ...] | None:
        """Return the way between two places with the fewest hops, of these the widest, or None."""
        if (start, goal) not in self._ways:
            self._ways[start, goal] = self._search(start, goal)
        return self._ways[start, goal]

    def _search(self, start: str, goal: str) -> tuple[Hop, ...] | None:
        heap: list[tuple[int, float, int, str, tuple[Hop, ...]]] = [(0, 0.0, 0, start, ())]
        sequence = itertools.count(1)  # so that equally good ways keep the order of the links
        visited: set[str] = set()
        while heap:
            num_hops, seconds_per_byte, _, place, way = heapq.heappop(heap)
            if place == goal:
                return way
            if place in visited:
                continue
            visited.add(place)
            for hop in self._hops.get(place, ()):
                slower = max(seconds_per_byte, 1 / hop.link.bandwidth_bytes_per_s)
                entry = (num_hops + 1, slower, next(sequence), hop.target, (*way, hop))
                heapq.heappush(heap, entry)
        return None

    def reached_from(self, start: str) -> set[str]:
        """Return all places to which a way leads, and the start itself."""
        reached, waiting = {start}, [start]
        while waiting:
            for hop in self._hops.get(waiting.pop(), ()):
                if hop.target not in reached:
                    reached.add(hop.target)
                    waiting.append(hop.target)
        return reached
