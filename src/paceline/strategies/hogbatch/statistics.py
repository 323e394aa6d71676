"""What the papers' figures show of asynchronous training, read from the spans of a timeline.

The updates of a device are its STEP spans, whose `part` is the number of samples. One of a GPU that
shares the model is in the model when the REDUCE after it ends; one that is still on its way when
the timeline ends does not count. Measured timelines are read as predicted ones are.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.core.cost import compute_lane
from paceline.core.plan import COMPUTE, Kind
from paceline.core.timeline import Span, Timeline, length, union
from paceline.strategies.hogbatch.work import MODEL

_TOLD_BY = frozenset({Kind.H2D, Kind.FORWARD, Kind.STEP, Kind.REDUCE})


class Update(NamedTuple):
    """One update of the shared model: when its worker read the model, and when it was in it.

    A GPU that shares the model reads it by copying it, others where forward begins.
    """

    read_s: float
    end_s: float
    num_samples: int


def updates(timeline: Timeline) -> dict[str, list[Update]]:
    """Return the updates that each device made, one for each of its batches."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(timeline.spans, key=lambda span: span.end_s):
        if span.kind in _TOLD_BY:
            spans[span.on[0].owner].append(span)
    return {device: _updates_in(own) for device, own in spans.items()}


def _updates_in(spans: Sequence[Span]) -> list[Update]:
    pushes = any(span.part == MODEL for span in spans)
    found: list[Update] = []
    read_s: float | None = None
    size = 0
    for span in spans:
        if span.part == MODEL or (span.kind is Kind.FORWARD and read_s is None):
            read_s = span.start_s
        if span.kind is Kind.STEP:
            size = int(span.part)
        if span.kind is (Kind.REDUCE if pushes else Kind.STEP):
            found.append(Update(span.start_s if read_s is None else read_s, span.end_s, size))
            read_s = None
    return found


def num_updates(
    timeline: Timeline, per_batch: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the updates of each device: its batches, or `per_batch` times as many."""
    return {
        device: len(made) * (1.0 if per_batch is None else per_batch[device])
        for device, made in updates(timeline).items()
    }


def update_shares(
    timeline: Timeline, per_batch: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return what part of all updates each device made (figure 8).

    Raises ValueError if there is none.
    """
    counted = num_updates(timeline, per_batch)
    total = sum(counted.values())
    if not total:
        raise ValueError("the timeline has no update of the model")
    return {device: number / total for device, number in counted.items()}


def batch_sizes(timeline: Timeline) -> dict[str, list[tuple[float, int]]]:
    """Return when each device ended a batch, and how many samples that had."""
    return {
        device: [(update.end_s, update.num_samples) for update in made]
        for device, made in updates(timeline).items()
    }


def num_samples(timeline: Timeline) -> dict[str, int]:
    """Return the samples that each device trained on."""
    return {device: sum(size for _, size in done) for device, done in batch_sizes(timeline).items()}


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Return the share of the makespan in which each device computes (figure 7)."""
    return {
        device: length(union(span for span in track if span.kind in COMPUTE)) / timeline.makespan_s
        for device in updates(timeline)
        for track in (timeline.tracks.get(compute_lane(device), ()),)
    }


def staleness(timeline: Timeline) -> dict[str, Counter[int]]:
    """Return for each device how many of its batches missed how many of the others' updates.

    A batch misses the updates that come in after it read the model and not after its own.
    """
    made = updates(timeline)
    ends = sorted(update.end_s for own in made.values() for update in own)
    missed = {}
    for device, own in made.items():
        own_ends = [update.end_s for update in own]
        missed[device] = Counter(
            _within(ends, update) - _within(own_ends, update) for update in own
        )
    return missed


def _within(ends: Sequence[float], update: Update) -> int:
    return bisect_right(ends, update.end_s) - bisect_right(ends, update.read_s)
