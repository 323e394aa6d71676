"""Spans and timelines: what happened, or would happen, when and on what."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from typing import Any, Literal, NamedTuple, Self

from paceline.core.plan import Kind, Plan, Resource

Origin = Literal["predicted", "rehearsed", "measured"]


class Span(NamedTuple):
    """One task that ran from `start_s` to `end_s`, and all that it held."""

    name: str
    kind: Kind
    on: tuple[Resource, ...]
    start_s: float
    end_s: float
    part: str = ""

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


Columns = tuple[Sequence[Any], ...]
Interval = tuple[float, float]
_START, _END = Span._fields.index("start_s"), Span._fields.index("end_s")


class Timeline:
    """All spans of a window, predicted, rehearsed or measured: one type for the three.

    Held as columns (those of `Span`), because a planner that asks a thousand simulations for their
    makespan should not pay for a million spans; `spans` makes them once somebody looks.
    """

    def __init__(self, spans: Iterable[Span], origin: Origin) -> None:
        self.columns: Columns = tuple(zip(*spans, strict=True)) or ((),) * len(Span._fields)
        self.origin: Origin = origin

    @classmethod
    def of_columns(cls, columns: Columns, origin: Origin) -> Self:
        """Return the timeline whose spans' fields are the given columns, in the order of `Span`."""
        timeline = cls((), origin)
        timeline.columns = columns
        return timeline

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """One span per task, in the order of the plan or of the recording."""
        # Not Span(*row): the Python-level constructor takes as long as scheduling the task did.
        return tuple(map(tuple.__new__, repeat(Span), zip(*self.columns, strict=True)))

    @cached_property
    def start_s(self) -> float:
        """When the first span starts."""
        return min(self.columns[_START], default=0.0)

    @cached_property
    def end_s(self) -> float:
        """When the last span ends."""
        return max(self.columns[_END], default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return self.end_s - self.start_s

    @cached_property
    def tracks(self) -> dict[Resource, tuple[Span, ...]]:
        """The spans of each resource, by start."""
        tracks: dict[Resource, list[Span]] = defaultdict(list)
        for span in self.spans:
            for resource in span.on:
                tracks[resource].append(span)
        return {resource: tuple(sorted(tracks[resource], key=_by_time)) for resource in tracks}

    @property
    def utilisation(self) -> dict[Resource, float]:
        """The share of the makespan during which each resource is held."""
        if not self.makespan_s:
            return dict.fromkeys(self.tracks, 0.0)
        return {
            resource: sum(span.duration_s for span in track) / self.makespan_s
            for resource, track in self.tracks.items()
        }

    def period_s(self) -> float:
        """Return the mean time between weight updates of a device.

        ValueError if no device updates twice: one step has a makespan, but no period.
        """
        return _mean_duration(self._steps().values())

    def typical_step_s(self) -> float:
        """Return the mean duration of the typical steps; ValueError if no device updates twice."""
        return _mean_duration(self.typical_steps.values())

    @cached_property
    def typical_steps(self) -> dict[str, list[Interval]]:
        """For each device that updates twice or more, its typical steps, from update to update.

        Of a measured timeline these are the middle half by duration: a step in which the machine
        did something else does not count. In a predicted one nothing happens by accident.
        """
        if self.origin == "predicted":
            return self._steps()
        return {owner: _middle_half(steps) for owner, steps in self._steps().items()}

    def steps_of(self, device: str) -> list[Interval]:
        """Return a device's typical steps.

        Where a server updates the weights for others, their steps are those of the device that
        updates most often. Without two updates the whole timeline is one step.
        """
        steps = self.typical_steps.get(device)
        if steps is None and device not in self._update_ends():
            steps = max(self.typical_steps.values(), key=len, default=None)
        return steps or [(self.start_s, self.end_s)]

    def num_steps(self) -> int:
        """Return the number of weight updates of the device that made the most."""
        return max((len(ends) for ends in self._update_ends().values()), default=0)

    def _steps(self) -> dict[str, list[Interval]]:
        return {
            owner: list(pairwise(ends))
            for owner, ends in self._update_ends().items()
            if len(ends) > 1
        }

    def _update_ends(self) -> dict[str, list[float]]:
        ends: dict[str, list[float]] = defaultdict(list)
        for span in self.spans:
            if span.kind is Kind.STEP:
                ends[span.on[0].owner].append(span.end_s)
        return {owner: sorted(times) for owner, times in ends.items()}


def _mean_duration(devices: Collection[list[Interval]]) -> float:
    if not devices:
        raise ValueError("a period needs two weight updates on one device")
    return sum(length(steps) / len(steps) for steps in devices) / len(devices)


def _middle_half(steps: list[Interval]) -> list[Interval]:
    by_duration = sorted(steps, key=lambda step: step[1] - step[0])
    outer = len(steps) // 4
    return sorted(by_duration[outer : len(steps) - outer])


def _by_time(span: Span) -> tuple[float, float]:
    return span.start_s, span.end_s


def critical_path(timeline: Timeline, plan: Plan) -> tuple[Span, ...]:
    """Return the chain of spans that the makespan consists of, first to last.

    Backwards from the last end: what a span waited for is, of its parents in the plan and its
    predecessors on the resources that it holds, the one that ended last.
    """
    spans = {span.name: span for span in timeline.spans}
    before = _predecessors(timeline)
    path: list[Span] = []
    current = max(timeline.spans, key=lambda span: span.end_s, default=None)
    while current is not None:
        path.append(current)
        parents = [spans[name] for name in plan[current.name].after if name in spans]
        earlier = [
            span for span in (*parents, *before[current.name]) if _by_time(span) < _by_time(current)
        ]
        current = max(earlier, key=lambda span: span.end_s, default=None)
    return tuple(reversed(path))


def _predecessors(timeline: Timeline) -> dict[str, list[Span]]:
    before: dict[str, list[Span]] = defaultdict(list)
    for track in timeline.tracks.values():
        for earlier, later in pairwise(track):
            before[later.name].append(earlier)
    return before


def union(spans: Iterable[Span]) -> list[Interval]:
    """Return the times during which at least one of the spans runs, as disjoint intervals."""
    result: list[Interval] = []
    for span in sorted(spans, key=_by_time):
        if result and span.start_s <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], span.end_s))
        else:
            result.append((span.start_s, span.end_s))
    return result


def intersection(left: list[Interval], right: list[Interval]) -> Iterator[Interval]:
    """Yield the times that lie in both, each given as sorted disjoint intervals."""
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
