"""Detect races between streams with vector clocks.

Each stream numbers its queued work, and has a vector clock: the position that each other stream is
known to have reached before the next work starts. An event passes its stream's clock to streams
that wait for the event. If two pieces of work access the same bytes, and at least one of them
writes, the clocks must order them. The actual times of execution do not matter.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

Clock = dict[int, int]  # stream number: position of the last work known to be done


def merge(clock: Clock, other: Clock) -> None:
    """Update a clock with the later positions of another clock."""
    for stream, position in other.items():
        clock[stream] = max(position, clock.get(stream, 0))


class Access(NamedTuple):
    """A read or write of bytes `start` to `end` by a stream's work number `position`."""

    start: int
    end: int
    stream: int
    position: int
    writes: bool
    what: str

    def is_before(self, clock: Clock) -> bool:
        """Whether this access is done according to the clock."""
        return clock.get(self.stream, 0) >= self.position


@dataclass(eq=False)
class Block:
    """An allocation of a stream, and the accesses that may still race with later accesses.

    `stream`: number of the allocating stream, or -1 for host memory. `users`: other streams that
    called `keep`.
    """

    stream: int = -1
    accesses: list[Access] = field(default_factory=list)
    users: set[int] = field(default_factory=set)

    def race(self, access: Access, clock: Clock) -> str | None:
        """Describe a race of an access with an earlier access; None without a race.

        `clock`: clock of the stream of `access`.
        """
        for other in self.accesses:
            overlaps = other.start < access.end and access.start < other.end
            is_ordered = other.is_before(clock) or not (other.writes or access.writes)
            if overlaps and not is_ordered:
                verb = "writes" if access.writes else "reads"
                has = "written" if other.writes else "read"
                return (
                    f"stream {access.stream} {verb} memory ({access.what}) that stream "
                    f"{other.stream} may not have {has} yet ({other.what}): let it wait"
                )
        return None

    def add(self, access: Access, clock: Clock) -> None:
        """Add an access, and remove accesses that it makes irrelevant to later accesses."""

        def matters(other: Access) -> bool:
            # An access ordered after the new access is also ordered after accesses before it.
            covered = access.start <= other.start and other.end <= access.end
            known = covered and other.is_before(clock)
            return not (known and (access.writes or not other.writes))

        self.accesses = [*filter(matters, self.accesses), access]

    def free(self, known: Clock) -> str | None:
        """Describe a race of freeing the memory with unfinished work; None without a race.

        `known`: clock of the stream that frees the memory.
        """
        for access in self.accesses:
            if not access.is_before(known):
                return (
                    f"memory is given back while stream {access.stream} may still use it "
                    f"({access.what}): keep it for that stream"
                )
        return None
