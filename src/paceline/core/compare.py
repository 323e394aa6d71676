"""Predicted beside measured, and the rules that keep the two honest."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise

from paceline.core.breakdown import Breakdown, breakdown
from paceline.core.plan import Plan
from paceline.core.timeline import Origin, Span, Timeline


@dataclass(frozen=True)
class Row:
    """One quantity in seconds per step, on both sides."""

    quantity: str
    left_s: float
    right_s: float

    @property
    def error(self) -> float | None:
        """How far the left is from the right, as a share of the right; None if that is zero."""
        return (self.left_s - self.right_s) / self.right_s if self.right_s else None


@dataclass(frozen=True)
class Comparison:
    """Two timelines side by side: the step first, then where its time goes."""

    left: Origin
    right: Origin
    rows: tuple[Row, ...]

    @property
    def step(self) -> Row:
        """The whole step."""
        return self.rows[0]


def compare(left: Timeline, right: Timeline) -> Comparison:
    """Lay the typical steps of two timelines side by side, usually predicted and measured."""
    rows = [Row("step", left.typical_step_s(), right.typical_step_s())]
    one, other = breakdown(left), breakdown(right)
    for field in fields(Breakdown):
        quantity = field.name.removesuffix("_s")
        rows.append(Row(quantity, getattr(one, field.name), getattr(other, field.name)))
    return Comparison(left.origin, right.origin, tuple(rows))


def conform(plan: Plan, timeline: Timeline, slack_s: float = 0.0) -> list[str]:
    """Return all ways in which a timeline breaks its plan; an empty list is conformity.

    The rules: the same names, no child before its parents end, no overlap on a resource. `slack_s`
    is how far clocks may disagree: marks of one process lie microseconds apart, and the offset of
    another machine's clock is only known to its error.
    """
    spans = {span.name: span for span in timeline.spans}
    faults = [f"{name}: planned, but not in the timeline" for name in plan.index.keys() - spans]
    faults += [f"{name}: in the timeline, but not planned" for name in spans.keys() - plan.index]
    if len(spans) < len(timeline.spans):
        faults.append(f"{len(timeline.spans) - len(spans)} spans have the name of another")
    faults += _early_children(plan, spans, slack_s)
    faults += _overlaps(timeline, slack_s)
    return sorted(faults)


def _early_children(plan: Plan, spans: dict[str, Span], slack_s: float) -> Iterator[str]:
    for task in plan.tasks:
        for name in task.after:
            child, parent = spans.get(task.name), spans.get(name)
            if child and parent and child.start_s < parent.end_s - slack_s:
                early = parent.end_s - child.start_s
                yield f"{task.name}: starts {early:.3g} s before {name} ends"


def _overlaps(timeline: Timeline, slack_s: float) -> Iterator[str]:
    for resource, track in timeline.tracks.items():
        for earlier, later in pairwise(track):
            if later.start_s < earlier.end_s - slack_s:
                overlap = earlier.end_s - later.start_s
                yield f"{resource}: {earlier.name} and {later.name} overlap by {overlap:.3g} s"
