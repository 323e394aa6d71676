"""Compare the parts of predicted and measured steps, and check a timeline against its plan."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, pairwise

from paceline.core.plan import COMMUNICATION, COMPUTE, Kind, Lane, Plan
from paceline.core.timeline import Interval, Span, Timeline, intersection, length, union

_OF_HOSTS = (Lane.REDUCE, Lane.CORE)


@dataclass(frozen=True)
class Breakdown:
    """Seconds per step of one device, or the mean of all devices.

    `train_s`: local steps, of which only the whole duration is known. `exposed_s`: communication
    during which the device does not compute. `hidden_s`: communication during computation.
    `idle_s`: time with neither computation nor communication. All parts except `hidden_s` add up to
    the step.
    """

    load_s: float
    forward_s: float
    backward_s: float
    train_s: float
    update_s: float
    hidden_s: float
    exposed_s: float
    idle_s: float

    @property
    def communication_s(self) -> float:
        """Seconds of communication, hidden and exposed."""
        return self.hidden_s + self.exposed_s

    @property
    def passes_s(self) -> float:
        """Seconds of forward passes, backward passes and local steps."""
        return self.forward_s + self.backward_s + self.train_s

    @property
    def compute_s(self) -> float:
        """Seconds of loading, forward, backward, local steps and weight update."""
        return self.load_s + self.passes_s + self.update_s

    @property
    def step_s(self) -> float:
        """Seconds of the step: the sum of all parts except hidden communication."""
        return self.compute_s + self.exposed_s + self.idle_s

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds by field name without "_s"; "train" is left out if it is zero."""
        held = {name.removesuffix("_s"): value for name, value in vars(self).items()}
        return {name: value for name, value in held.items() if value or name != "train"}

    def divided(self, by: float) -> "Breakdown":
        """Return the breakdown with all seconds divided by `by`."""
        return Breakdown(*(value / by for value in vars(self).values()))


def breakdown_by_device(timeline: Timeline) -> dict[str, Breakdown]:
    """Return the seconds per step of each device, by kind of work.

    Hosts are left out, although their memory and cores are resources of the timeline.
    """
    devices = dict.fromkeys(
        resource.owner
        for resource, track in timeline.tracks.items()
        if resource.lane not in _OF_HOSTS and any(span.kind in COMPUTE for span in track)
    )
    spans: dict[str, list[Span]] = defaultdict(list)
    for resource, track in timeline.tracks.items():
        spans[resource.owner] += track
    return {device: _of_device(timeline, device, spans[device]) for device in devices}


def breakdown(timeline: Timeline) -> Breakdown:
    """Return the mean breakdown of all devices; ValueError without any computation."""
    parts = list(breakdown_by_device(timeline).values())
    if not parts:
        raise ValueError("the timeline has no computation")
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return Breakdown(*(sum(column) / len(parts) for column in columns))


def _of_device(timeline: Timeline, device: str, spans: Iterable[Span]) -> Breakdown:
    """Return a device's mean breakdown over its typical steps (`Timeline.steps_of`)."""
    steps, of_kind = timeline.steps_of(device), defaultdict[Kind, list[Span]](list)
    for span in spans:
        of_kind[span.kind].append(span)

    def during(*kinds: Kind) -> list[Interval]:
        chosen = union(chain.from_iterable(of_kind[kind] for kind in kinds))
        return list(intersection(chosen, steps))

    compute, exchange = during(*COMPUTE), during(*COMMUNICATION)
    hidden = length(intersection(compute, exchange))
    exposed = length(exchange) - hidden
    parts = (Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.TRAIN, Kind.STEP)
    idle = max(0.0, length(steps) - length(compute) - exposed)
    seconds = [*(length(during(kind)) for kind in parts), hidden, exposed, idle]
    return Breakdown(*(total / len(steps) for total in seconds))


@dataclass(frozen=True)
class ComparisonRow:
    """The seconds of the step, or of one of its parts, in two compared timelines.

    `error`: (`left_s` - `right_s`) / `right_s`; None if `right_s` is zero.
    """

    quantity: str
    left_s: float
    right_s: float
    error: float | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of two timelines: the step, then its parts.

    `left` and `right` name the timelines, such as "predicted".
    """

    left: str
    right: str
    rows: tuple[ComparisonRow, ...]


def compare(left: Timeline, right: Timeline) -> Comparison:
    """Compare the typical steps of two timelines, usually predicted and measured."""
    one, other = breakdown(left).seconds, breakdown(right).seconds
    pairs = {"step": (left.typical_step_s(), right.typical_step_s())}
    pairs |= {name: (one.get(name, 0.0), other.get(name, 0.0)) for name in one | other}
    rows = (
        ComparisonRow(name, own_s, end_s, (own_s - end_s) / end_s if end_s else None)
        for name, (own_s, end_s) in pairs.items()
    )
    return Comparison(left.origin, right.origin, tuple(rows))


def conform(plan: Plan, timeline: Timeline, slack_s: float = 0.0) -> list[str]:
    """Return the differences between a timeline and its plan; an empty list if there are none.

    Checks that plan and timeline have the same tasks, that each task starts after its predecessors
    have ended, and that tasks on the same resource do not overlap. Tasks in which host cores handle
    messages may be missing, because no process records them. `slack_s`: tolerated error of times,
    including the error of clock offsets between machines.
    """
    spans = {span.id: span for span in timeline.spans}
    planned = {task.id for task in plan.tasks}
    handled = {task.id for task in plan.tasks if task.on[0].lane is Lane.MESSAGES}
    missing = planned - spans.keys() - handled
    faults = [f"{one.name}: planned, but not in the timeline" for one in missing]
    faults += [f"{one.name}: in the timeline, but not planned" for one in spans.keys() - planned]
    if len(spans) < len(timeline.spans):
        faults.append(f"{len(timeline.spans) - len(spans)} spans have the name of another span")
    for task in plan.tasks:
        for before in task.after:
            child, parent = spans.get(task.id), spans.get(before)
            if child and parent and child.start_s < parent.end_s - slack_s:
                early = parent.end_s - child.start_s
                faults.append(f"{task.name}: starts {early:.3g} s before {before.name} ends")
    for resource, track in timeline.tracks.items():
        for one, other in pairwise(track):
            if other.start_s < one.end_s - slack_s:
                overlap = one.end_s - other.start_s
                faults.append(f"{resource}: {one.name} and {other.name} overlap by {overlap:.3g} s")
    return sorted(faults)
