"""Repeat work for a while, and reduce what it took to medians and quartiles.

Ranks that measure together agree on a number of rounds first, so that collectives fit.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from paceline.core.timeline import Span, quartiles
from paceline.links.clock import Clock
from paceline.links.group import Group

FEWEST_ROUNDS = 3  # of which a median can leave one outlier out
_MOST_ROUNDS = 400

Item = TypeVar("Item")
Work = Callable[[], object]


class Spread(BaseModel, frozen=True):
    """The median of `count` measurements, and their quartiles."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of one or more values."""
        lower, middle, upper = quartiles(values)
        return cls(median=middle, lower=lower, upper=upper, count=len(values))

    @classmethod
    def rate(cls, amount: float, seconds: Sequence[float]) -> Self:
        """Return the spread of `amount` per second, given the seconds of each round."""
        return cls.of([amount / one for one in seconds])


def seconds_between(clock: Clock, marks: Iterable[Any]) -> list[float]:
    """Return the seconds between each mark and the next one."""
    return [end - start for start, end in pairwise(clock.seconds(list(marks)))]


def median_s(work: Work, num_rounds: int = FEWEST_ROUNDS) -> float:
    """Return the median seconds of some calls of `work`, which is done when it returns."""
    seconds = []
    for _ in range(num_rounds):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def median_durations(spans: Iterable[Span], key: Callable[[Span], Item]) -> dict[Item, float]:
    """Return the median duration of the spans of each key."""
    durations: dict[Item, list[float]] = defaultdict(list)
    for span in spans:
        durations[key(span)].append(span.duration_s)
    return {each: median(values) for each, values in durations.items()}


def endless(source: Callable[[], Iterator[Item]]) -> Iterator[Item]:
    """Yield the items of `source()` again and again: one call is one epoch."""
    while True:
        yield from source()


def num_rounds(seconds: float, round_s: float, fewest: int, most: int) -> int:
    """Return the number of rounds of `round_s` in `seconds`, between `fewest` and `most`."""
    return int(max(fewest, min(most, seconds / round_s)))


def timed(works: Sequence[Work], clock: Clock, rounds: int) -> list[list[float]]:
    """Do all works in turns, and return for each the seconds of its rounds."""
    marks = [clock.mark()]
    for _ in range(rounds):
        for work in works:
            work()
            marks.append(clock.mark())
    seconds = seconds_between(clock, marks)
    return [seconds[i :: len(works)] for i in range(len(works))]


@dataclass(frozen=True)
class Sampler:
    """Repeats work for about `seconds_each`, equally often on all ranks, by one clock.

    All ranks call it together: each measures what it gets beside the others.
    """

    group: Group
    clock: Clock
    seconds_each: float

    def seconds(self, work: Work) -> list[float]:
        """Return the seconds of each repetition, three or more."""
        return self.in_turns([work])[0]

    def in_turns(self, works: Sequence[Work]) -> list[list[float]]:
        """Return for each work the seconds of its repetitions; a disturbance hits all alike."""
        for work in works:
            work()  # allocates memory and chooses kernels, which later rounds do not
        first = timed(works, self.clock, 1)
        slowest = max(1e-9, *self.group.gather(sum(map(sum, first))))
        rounds = num_rounds(self.seconds_each * len(works), slowest, FEWEST_ROUNDS, _MOST_ROUNDS)
        more = timed(works, self.clock, rounds - 1)
        return [one + others for one, others in zip(first, more, strict=True)]

    def of_last(self, works: Sequence[Work], ranks: Collection[int]) -> list[list[float]]:
        """Return the seconds of collectives of these ranks, in turns; other ranks do nothing.

        Each round counts as long as it took the rank that joined last: the other ranks' seconds
        include waiting for that one.
        """
        own = self.in_turns(works if self.group.rank in ranks else [idle] * len(works))
        rows = self.group.gather(own)
        return [
            [min(row) for row in zip(*(rows[rank][i] for rank in ranks), strict=True)]
            for i in range(len(works))
        ]


def idle() -> None:
    """Do nothing, while another rank is measured."""
