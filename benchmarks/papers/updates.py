"""Extract hogbatch's updates from a planned timeline, in the format of a run's log.

Each STEP span of a device is an update. An update of a GPU that shares the model reaches the model
at the end of the following REDUCE. Updates in transit at the end of the timeline do not count.
"""

from collections import defaultdict
from collections.abc import Sequence

from paceline.core.cost import compute_lane
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline
from paceline.strategies.hogbatch.plan import MODEL
from paceline.strategies.hogbatch.statistics import Made, Update

_UPDATE_KINDS = frozenset({Kind.H2D, Kind.FORWARD, Kind.STEP, Kind.REDUCE})


def updates(timeline: Timeline) -> Made:
    """Return each device's updates in a planned timeline.

    Batches of a GPU overlap, so spans are grouped by batch number.
    """
    spans: dict[str, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in timeline.spans:
        if span.kind in _UPDATE_KINDS:
            spans[span.on[0].owner][span.step].append(span)
    found: Made = {}
    for device, batches in spans.items():
        pushes = any(span.part == MODEL for own in batches.values() for span in own)
        made = (_update_of(own, pushes) for own in batches.values())
        found[device] = sorted((one for one in made if one is not None), key=lambda one: one.end_s)
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


def utilisation(timeline: Timeline) -> dict[str, float]:
    """Return the share of the makespan in which each device computes (figure 7)."""
    held = timeline.utilisation
    return {device: held.get(compute_lane(device), 0.0) for device in updates(timeline)}
