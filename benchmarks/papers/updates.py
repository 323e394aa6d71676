"""Extract hogbatch's updates from a planned timeline, in the format of a run's log.

Each STEP span of a device is an update. An update of a GPU that shares the model reaches the model
at the end of the following REDUCE. Updates in transit at the end of the timeline do not count.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from paceline.core.cost import compute_lane
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline
from paceline.strategies.hogbatch.plan import MODEL

_UPDATE_KINDS = frozenset({Kind.H2D, Kind.FORWARD, Kind.STEP, Kind.REDUCE})


class Update(NamedTuple):
    """A batch, with fields of a run's `BatchRecord`; it starts when its worker reads the model."""

    started_s: float
    ended_s: float
    num_samples: int


def updates(timeline: Timeline) -> dict[str, list[Update]]:
    """Return each device's updates in a planned timeline.

    Batches of a GPU overlap, so spans are grouped by batch number.
    """
    spans: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.kind in _UPDATE_KINDS:
            spans[span.on[0].owner][span.step].append(span)
    found = {}
    for device, batches in spans.items():
        pushes = any(span.part == MODEL for own in batches.values() for span in own)
        made = (_update_of(own, pushes) for own in batches.values())
        known = (one for one in made if one is not None)
        found[device] = sorted(known, key=lambda one: one.ended_s)
    return found


def _update_of(spans: Sequence[Span], pushes: bool) -> Update | None:
    """Return the update of a batch with these spans; None if it has not reached the model."""
    last = Kind.REDUCE if pushes else Kind.STEP
    ends = [span.end_s for span in spans if span.kind is last]
    if not ends:
        return None
    step = next(span for span in spans if span.kind is Kind.STEP)
    reading = Kind.H2D if pushes else Kind.FORWARD
    reads = (span.start_s for span in spans if span.kind is reading and span.part != "batch")
    return Update(min(reads, default=step.start_s), ends[0], step.num_samples)


def num_samples(timeline: Timeline) -> dict[str, int]:
    """Return the number of samples that each device trained on."""
    return {name: sum(one.num_samples for one in own) for name, own in updates(timeline).items()}


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Return the share of the makespan in which each device computes (figure 7)."""
    held = timeline.utilisation
    return {device: held.get(compute_lane(device), 0.0) for device in updates(timeline)}
