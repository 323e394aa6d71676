"""Where a step's time goes: forward, backward, weight update, and communication that shows."""

from dataclasses import dataclass, fields

from paceline.core.plan import COMMUNICATION, COMPUTE, Kind
from paceline.core.timeline import Span, Timeline, intersection, length, union


@dataclass(frozen=True)
class Breakdown:
    """Seconds per step of one device, or the mean of all devices.

    `exposed_s` is communication during which the device computes nothing; `hidden_s` runs beside
    its computation; `idle_s` is neither.
    """

    load_s: float
    forward_s: float
    backward_s: float
    update_s: float
    hidden_s: float
    exposed_s: float
    idle_s: float

    @property
    def communication_s(self) -> float:
        """All communication, hidden or not."""
        return self.hidden_s + self.exposed_s

    @property
    def compute_s(self) -> float:
        """Loading, forward, backward and weight update."""
        return self.load_s + self.forward_s + self.backward_s + self.update_s


def breakdown_by_device(timeline: Timeline) -> dict[str, Breakdown]:
    """Return each device's breakdown per step; a device is what runs forward or backward."""
    devices = dict.fromkeys(
        resource.owner
        for resource, track in timeline.tracks.items()
        if any(span.kind in COMPUTE for span in track)
    )
    return {device: _of_device(timeline, device) for device in devices}


def breakdown(timeline: Timeline) -> Breakdown:
    """Return the mean over the devices. ValueError if nothing was computed."""
    parts = list(breakdown_by_device(timeline).values())
    if not parts:
        raise ValueError("the timeline has no computation")
    means = {
        field.name: sum(getattr(part, field.name) for part in parts) / len(parts)
        for field in fields(Breakdown)
    }
    return Breakdown(**means)


def _of_device(timeline: Timeline, device: str) -> Breakdown:
    spans = {
        span
        for resource, track in timeline.tracks.items()
        if resource.owner == device
        for span in track
    }
    steps = sum(span.kind is Kind.STEP for span in spans) or 1
    compute = union(span for span in spans if span.kind in COMPUTE)
    exchange = union(span for span in spans if span.kind in COMMUNICATION)
    hidden = length(intersection(compute, exchange))
    exposed = length(exchange) - hidden
    idle = timeline.makespan_s - length(compute) - exposed
    return Breakdown(
        load_s=_total(spans, Kind.LOAD) / steps,
        forward_s=_total(spans, Kind.FORWARD) / steps,
        backward_s=_total(spans, Kind.BACKWARD) / steps,
        update_s=_total(spans, Kind.STEP) / steps,
        hidden_s=hidden / steps,
        exposed_s=exposed / steps,
        idle_s=max(0.0, idle) / steps,
    )


def _total(spans: set[Span], kind: Kind) -> float:
    return sum(span.duration_s for span in spans if span.kind is kind)
