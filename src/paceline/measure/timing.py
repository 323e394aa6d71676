"""Repeat work for a while, and reduce the times to medians, quartiles and relative spread.

Ranks that measure together agree on the number of rounds first, so that collectives match.
`CoreTime` and `lost_beside` measure how exchanges slow down concurrent computation.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Self, TypeVar

import torch
from pydantic import BaseModel

from paceline.core.losses import BUSY, unrest_between
from paceline.core.plan import COMPUTE
from paceline.core.timeline import Span, quartiles
from paceline.links.clock import Clock
from paceline.links.group import Group

FEWEST_ROUNDS = 3  # so that the median ignores one outlier
MIN_SECONDS = 1e-9
_MOST_ROUNDS = 400
# maximum of `lost_beside`: computation gets some time even if an exchange keeps all cores busy
_MOST_LOST = 0.95

Item = TypeVar("Item")
Work = Callable[[], object]
# The rounds of one rank. A round lists the seconds of the step, then the seconds of other work.
Rounds = list[list[float]]


class Spread(BaseModel, frozen=True):
    """The median and quartiles of `count` measurements."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the spread of one or more values."""
        lower, middle, upper = quartiles(values)
        return cls(median=middle, lower=lower, upper=upper, count=len(values))

    @property
    def unrest(self) -> float:
        """Half the distance between the quartiles, relative to the median."""
        return unrest_between(self.lower, self.median, self.upper)

    @classmethod
    def rate(cls, amount: float, seconds: Sequence[float]) -> Self:
        """Return the spread of `amount` per second, given the seconds of each round."""
        return cls.of([amount / one for one in seconds])


def seconds_between(clock: Clock, marks: Iterable[Any]) -> list[float]:
    """Return the seconds between each mark and the next one."""
    return [end - start for start, end in pairwise(clock.seconds(list(marks)))]


def median_s(work: Work, num_rounds: int = FEWEST_ROUNDS) -> float:
    """Return the median seconds of `num_rounds` calls of `work`, which must be synchronous."""
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
    """Yield the items of one epoch after another without end; `source()` returns an epoch."""
    while True:
        yield from source()


def num_rounds(seconds: float, round_s: float, fewest: int, most: int) -> int:
    """Return how many rounds of `round_s` fit in `seconds`, between `fewest` and `most`."""
    return int(max(fewest, min(most, seconds / round_s)))


def timed(works: Sequence[Work], clock: Clock, rounds: int) -> list[list[float]]:
    """Call the works in turns, `rounds` times each; return the seconds of each work's calls."""
    marks = [clock.mark()]
    for _ in range(rounds):
        for work in works:
            work()
            marks.append(clock.mark())
    seconds = seconds_between(clock, marks)
    return [seconds[i :: len(works)] for i in range(len(works))]


@dataclass(frozen=True)
class Sampler:
    """Repeats work for about `seconds_each`, equally often on all ranks.

    All ranks must call each method together.
    """

    group: Group
    clock: Clock
    seconds_each: float

    def seconds(self, work: Work) -> list[float]:
        """Return the seconds of each repetition, three or more."""
        return self.in_turns([work])[0]

    def in_turns(self, works: Sequence[Work]) -> list[list[float]]:
        """Repeat works in turns, so that disturbances affect all of them; return their seconds."""
        for work in works:
            work()  # the first call allocates memory and chooses kernels
        first = timed(works, self.clock, 1)
        slowest = max(MIN_SECONDS, *self.group.gather(sum(map(sum, first))))
        rounds = num_rounds(self.seconds_each * len(works), slowest, FEWEST_ROUNDS, _MOST_ROUNDS)
        more = timed(works, self.clock, rounds - 1)
        return [one + others for one, others in zip(first, more, strict=True)]

    def of_last(self, works: Sequence[Work], ranks: Collection[int]) -> list[list[float]]:
        """Time collectives (`works`) among `ranks`; return the seconds of each work's calls.

        Other ranks do nothing. A call's time is the shortest on any rank in `ranks`: the time on
        the last rank to join, which does not wait for others.
        """
        own = self.in_turns(works if self.group.rank in ranks else [idle] * len(works))
        rows = self.group.gather(own)
        return [
            [min(row) for row in zip(*(rows[rank][i] for rank in ranks), strict=True)]
            for i in range(len(works))
        ]


def idle() -> None:
    """Do nothing, while another rank is measured."""


def rounds_of_all(take: Callable[[], Rounds], group: Group) -> list[Rounds]:
    """Measure rounds by calling `take` on all ranks; return all ranks' rounds; collective.

    `take()` measures equally many rounds on each rank. If the relative spread of step times exceeds
    the limit `BUSY`, `take()` is called a second time, and the rounds of both calls are returned.
    """
    rows: list[Rounds] = group.gather(take())
    if unrest_of(rows) <= BUSY:
        return rows
    return [first + more for first, more in zip(rows, group.gather(take()), strict=True)]


def unrest_of(rows: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the relative spread of the step times (`unrest_between`).

    The slowest rank determines a step's time. `rows[rank][i]`: the seconds of the step in round i,
    followed by the seconds of other work.
    """
    return Spread.of([max(row[0] for row in one) for one in zip(*rows, strict=True)]).unrest


def unrest_of_traced(spans: Iterable[Span]) -> float:
    """Return the relative spread, over traced steps, of the slowest device's computing time."""
    seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind in COMPUTE:
            seconds[span.step][span.on[0].owner] += span.duration_s
    return Spread.of([max(own.values()) for own in seconds.values()]).unrest


class CoreTime:
    """Calls `work`, and measures how many cores this process keeps busy during the calls."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._busy_s = self._elapsed_s = 0.0
        self._num_calls = 0

    def __call__(self) -> None:
        """Call the work once."""
        self._num_calls += 1
        before = time.process_time(), time.perf_counter()
        self._work()
        self._busy_s += time.process_time() - before[0]
        self._elapsed_s += time.perf_counter() - before[1]

    @property
    def busy_s(self) -> float:
        """Mean processor time of a call, summed over all threads."""
        return self._busy_s / max(self._num_calls, 1)

    @property
    def num_cores(self) -> float:
        """Mean number of busy cores."""
        return self._busy_s / max(self._elapsed_s, MIN_SECONDS)


def lost_beside(
    num_taken: float,
    num_workers: int,
    num_cores: int | None = None,
    num_threads: int | None = None,
) -> float:
    """Return the share of speed that a worker's computation loses during an exchange.

    The exchange keeps `num_taken` cores busy, and uses idle cores first. `num_workers` workers
    share the host's `num_cores` cores, and each worker computes with `num_threads` threads; by
    default these are the cores and threads of this process.
    """
    cores = num_cores or len(os.sched_getaffinity(0))
    threads = num_threads or torch.get_num_threads()
    idle_cores = max(0.0, cores / num_workers - threads)
    return min(_MOST_LOST, max(0.0, num_taken - idle_cores) / threads)
