"""Where a step's time goes: forward, backward, weight update, and communication that shows."""

from dataclasses import dataclass, fields

from paceline.core.plan import COMMUNICATION, COMPUTE, Kind
from paceline.core.timeline import Interval, Timeline, intersection, length, union


@dataclass(frozen=True)
class Breakdown:
    """Seconds per step of one device, or the mean of all devices.

    `exposed_s` is communication during which the device computes nothing; `hidden_s` runs beside
    its computation; `idle_s` is neither. All but `hidden_s` add up to the step.
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
    """Return the breakdown of the device over the steps that `Timeline.steps_of` gives."""
    spans = {
        span
        for resource, track in timeline.tracks.items()
        if resource.owner == device
        for span in track
    }
    steps = timeline.steps_of(device)

    def during(*kinds: Kind) -> list[Interval]:
        chosen = union(span for span in spans if span.kind in kinds)
        return list(intersection(chosen, steps))

    compute, exchange = during(*COMPUTE), during(*COMMUNICATION)
    hidden = length(intersection(compute, exchange))
    exposed = length(exchange) - hidden
    seconds = {
        "load_s": length(during(Kind.LOAD)),
        "forward_s": length(during(Kind.FORWARD)),
        "backward_s": length(during(Kind.BACKWARD)),
        "update_s": length(during(Kind.STEP)),
        "hidden_s": hidden,
        "exposed_s": exposed,
        "idle_s": max(0.0, length(steps) - length(compute) - exposed),
    }
    return Breakdown(**{name: total / len(steps) for name, total in seconds.items()})
