"""The work of a run: units that are handed out to the workers of each round.

A unit is one worker's part of a step of the run, and the batch of an inner step. Unit `u` of a run
for n workers is part `u % n` of step `u // n`, so that equal workers have the samples of
data-parallel ranks.

    two equal workers, rounds of 3 steps     0: units 0 2 4 | 6 8 10      1: units 1 3 5 | 7 9 11
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from paceline.core.balance import apportion


class Units:
    """The units that are left: those that lost workers have given back go first."""

    def __init__(self, num_units: int, first: int = 0, returned: Iterable[int] = ()) -> None:
        self.num_units, self.next = num_units, first
        self.returned = list(returned)
        heapify(self.returned)

    @property
    def num_left(self) -> int:
        """The units that nobody has."""
        return self.num_units - self.next + len(self.returned)

    def give_back(self, units: Iterable[int]) -> None:
        """Take units back that a worker had, and has not trained on."""
        for unit in units:
            heappush(self.returned, unit)

    def take(self, wanted: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the units of each worker, as many as it wants, or its part of what is left.

        Workers take turns, a faster one more often.
        """
        workers, counts = list(wanted), list(wanted.values())
        if sum(counts) > self.num_left:
            counts = list(apportion(self.num_left, counts))
        turns = sorted(
            ((turn + 0.5) / count, place)
            for place, count in enumerate(counts)
            for turn in range(count)
        )
        dealt: dict[int, list[int]] = {worker: [] for worker in workers}
        for _, place in turns:
            dealt[workers[place]].append(self._take_one())
        return dealt

    def _take_one(self) -> int:
        if self.returned:
            return heappop(self.returned)
        self.next += 1
        return self.next - 1


def inner_steps(sync_every: int, step_seconds: Sequence[float | None]) -> tuple[int, ...]:
    """Return the inner steps of each worker in a round, `sync_every` on average.

    With the seconds of a step they follow the workers' speeds, and all take about as long; a worker
    whose speed is not known (None) counts as the mean of the others. Each takes at least one.
    """
    known = [1 / seconds for seconds in step_seconds if seconds]
    mean = sum(known) / len(known) if known else 1.0
    speeds = [1 / seconds if seconds else mean for seconds in step_seconds]
    counts = apportion(sync_every * len(speeds), speeds)
    return tuple(max(1, count) for count in counts)
