"""The order of work in streams: which piece is known to be done before which, and what races.

Each stream counts the work that is queued in it, and knows how far the others are when it begins
its own next piece: a vector clock. An event carries the knowledge of its stream to those that wait
for it. Two pieces that touch the same bytes, one of them writing, must be in an order by that
knowledge; whichever happened to be first in time says nothing.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[int, int]  # by the number of a stream: how much of its work is known to be done


def merge(clock: Clock, other: Clock) -> None:
    """Take over what another clock knows."""
    for stream, position in other.items():
        clock[stream] = max(position, clock.get(stream, 0))


class Access(NamedTuple):
    """Bytes `start` to `end` of a block, read or written by the `position`th work of a stream."""

    start: int
    end: int
    stream: int
    position: int
    writes: bool
    what: str

    def is_before(self, clock: Clock) -> bool:
        """Return True if that clock knows it to be done."""
        return clock.get(self.stream, 0) >= self.position


@dataclass(eq=False)
class Block:
    """Memory that was allocated at once, in a stream, and the accesses that may still matter.

    `users`: streams that have asked to `keep` it. Memory of the host is of no stream: -1.
    """

    stream: int = -1
    accesses: list[Access] = field(default_factory=list)
    users: set[int] = field(default_factory=set)

    def race(self, access: Access, clock: Clock) -> str | None:
        """Return how an access of a stream with that clock races with another; None if not."""
        for other in self.accesses:
            overlaps = other.start < access.end and access.start < other.end
            is_ordered = other.is_before(clock) or not (other.writes or access.writes)
            if overlaps and not is_ordered:
                return _race(access, other)
        return None

    def add(self, access: Access, clock: Clock) -> None:
        """Add an access, and forget those that all later ones need not be compared with."""

        def matters(other: Access) -> bool:
            # Whatever comes after the new access comes after one that it covers and follows.
            covered = access.start <= other.start and other.end <= access.end
            known = covered and other.is_before(clock)
            return not (known and (access.writes or not other.writes))

        self.accesses = [*filter(matters, self.accesses), access]

    def free(self, known: Clock) -> str | None:
        """Return how giving the memory back races with work that this clock does not know done."""
        for access in self.accesses:
            if not access.is_before(known):
                return (
                    f"memory is given back while stream {access.stream} may still use it "
                    f"({access.what}): keep it for that stream"
                )
        return None


def _race(access: Access, other: Access) -> str:
    verb, has = ("writes" if access.writes else "reads"), "written" if other.writes else "read"
    return (
        f"stream {access.stream} {verb} memory ({access.what}) that stream {other.stream} may not "
        f"have {has} yet ({other.what}): let it wait"
    )
