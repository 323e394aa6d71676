"""Spans and timelines: when each task ran or would run, and on which resources."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from statistics import quantiles
from typing import Annotated, NamedTuple

from pydantic import FailFast

from paceline.core.plan import Kind, Resource, TaskId


class Origin(StrEnum):
    """The origin of a timeline: training, a rehearsal with emulated layers, or a simulation."""

    MEASURED = "measured"
    REHEARSED = "rehearsed"
    PREDICTED = "predicted"


class Span(NamedTuple):
    """A task, and the time from `start_s` to `end_s` in which it ran."""

    kind: Kind
    step: int
    part: str
    worker: int | None
    on: Annotated[tuple[Resource, ...], FailFast()]  # a worker sends spans: keep only one error
    start_s: float
    end_s: float
    sub_batch: int | None = None
    num_samples: int = 0

    @property
    def id(self) -> TaskId:
        """The identity of the task."""
        return TaskId(self.step, self.kind, self.part, self.worker, self.sub_batch)

    @property
    def name(self) -> str:
        """The identity as text."""
        return self.id.name

    def moved(self, by_s: float) -> "Span":
        """Return the span shifted by `by_s` seconds."""
        return self._replace(start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return self.end_s - self.start_s


_by_time = attrgetter("start_s", "end_s")
Interval = tuple[float, float]


class Timeline:
    """The spans of some consecutive steps: predicted, rehearsed or measured.

    `interval`: the first start and the last end of `spans`, if known. With it, `spans`
    is not read until needed: of most simulations, a planner needs only the makespan.
    """

    def __init__(
        self, spans: Iterable[Span], origin: Origin, interval: Interval | None = None
    ) -> None:
        self.origin = Origin(origin)
        self._source = tuple(spans) if interval is None else spans
        self.start_s, self.end_s = interval or (
            min((span.start_s for span in self._source), default=0.0),
            max((span.end_s for span in self._source), default=0.0),
        )

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans, one per task, in the order of the plan or recording."""
        return tuple(self._source)

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end_s - self.start_s

    @cached_property
    def tracks(self) -> dict[Resource, tuple[Span, ...]]:
        """The spans of each resource, sorted by start."""
        tracks: dict[Resource, list[Span]] = defaultdict(list)
        for span in self.spans:
            for resource in span.on:
                tracks[resource].append(span)
        return {resource: tuple(sorted(tracks[resource], key=_by_time)) for resource in tracks}

    @property
    def utilisation(self) -> dict[Resource, float]:
        """For each resource, the share of the makespan in which a task holds it."""
        return {
            resource: sum(span.duration_s for span in track) / (self.makespan_s or 1.0)
            for resource, track in self.tracks.items()
        }

    def typical_step_s(self) -> float:
        """Return the mean seconds of `typical_steps`; ValueError if there are none."""
        if not self.typical_steps:
            raise ValueError("the timeline must have at least two weight updates on one device")
        means = [length(steps) / len(steps) for steps in self.typical_steps.values()]
        return sum(means) / len(means)

    @cached_property
    def typical_steps(self) -> dict[str, list[Interval]]:
        """The typical steps of each device with two or more weight updates.

        Steps last from one weight update to the next. In a measured timeline typical steps are the
        middle half by duration, which excludes steps disturbed by other programs. In a predicted
        timeline all steps are typical.
        """
        if self.origin is Origin.PREDICTED:
            return self.steps()
        middle = {}
        for owner, steps in self.steps().items():
            outer = len(steps) // 4
            by_duration = sorted(steps, key=lambda step: step[1] - step[0])
            middle[owner] = sorted(by_duration[outer : len(steps) - outer])
        return middle

    def steps_of(self, device: str) -> list[Interval]:
        """Return a device's typical steps; with only one weight update, the whole timeline.

        For a device without weight updates, because a server updates its weights, returns the steps
        of the device with the most updates.
        """
        steps = self.typical_steps.get(device)
        if steps is None and device not in self._update_ends:
            steps = max(self.typical_steps.values(), key=len, default=None)
        return steps or [(self.start_s, self.end_s)]

    def num_steps(self) -> int:
        """Return the number of weight updates of the device with the most updates."""
        return max((len(ends) for ends in self._update_ends.values()), default=0)

    def steps(self) -> dict[str, list[Interval]]:
        """Return the steps of each device with two or more weight updates."""
        return {
            owner: list(pairwise(ends))
            for owner, ends in self._update_ends.items()
            if len(ends) > 1
        }

    @cached_property
    def _update_ends(self) -> dict[str, list[float]]:
        ends: dict[str, list[float]] = defaultdict(list)
        for span in self.spans:
            if span.kind is Kind.STEP:
                ends[span.on[0].owner].append(span.end_s)
        return {owner: sorted(times) for owner, times in ends.items()}


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the disjoint intervals during which at least one span runs."""
    result: list[Interval] = []
    for span in sorted(spans, key=_by_time):
        if result and span.start_s <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], span.end_s))
        else:
            result.append((span.start_s, span.end_s))
    return result


def intersection(left: list[Interval], right: list[Interval]) -> Iterator[Interval]:
    """Yield the times that are in both of two sequences of sorted, disjoint intervals."""
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            yield start, end
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1


def length(intervals: Iterable[Interval]) -> float:
    """Return the total time of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of one or more values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return lower, middle, upper
