"""Two steps from the middle of a timeline: enough to see how steps follow one another."""

from dataclasses import dataclass

from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Origin, Span, Timeline

_NUM_STEPS = 2
_MOST_ROWS = 40


@dataclass(frozen=True)
class Excerpt:
    """What happens during `length_s`, in seconds from the start of the excerpt.

    Spans that reach beyond it keep their times. It begins and ends with weight updates of one
    device; `step_ends_s` are those inside it and the last. `num_steps` and `num_rows` are those of
    the timeline, of which only the first rows are here, if there are many.
    """

    origin: Origin
    length_s: float
    rows: dict[Resource, tuple[Span, ...]]
    step_ends_s: tuple[float, ...]
    num_steps: int
    num_rows: int

    @property
    def title(self) -> str:
        """What the excerpt shows, such as "measured: 2 of 20 steps"."""
        shown = "the whole timeline"
        if self.step_ends_s:
            shown = f"{len(self.step_ends_s)} of {self.num_steps} steps"
        left_out = len(self.rows) < self.num_rows
        rows = f", {len(self.rows)} of {self.num_rows} rows" if left_out else ""
        return f"{self.origin}: {shown}{rows}"


def excerpt(timeline: Timeline) -> Excerpt:
    """Return two consecutive steps from the middle of the timeline.

    They are those of the device that updates its weights most often: a device that takes a hundred
    times as long would fill the picture with hundreds of steps. A timeline without a whole step
    between two updates is shown as it is.
    """
    ends = max(_update_ends(timeline), key=len, default=[])
    if len(ends) < 2:
        return _cut(timeline, [timeline.start_s], timeline.end_s, len(ends))
    first = max(0, (len(ends) - _NUM_STEPS - 1) // 2)
    borders = ends[first : first + _NUM_STEPS + 1]
    return _cut(timeline, borders, borders[-1], len(ends))


def _update_ends(timeline: Timeline) -> list[list[float]]:
    return [
        sorted(span.end_s for span in track if span.kind is Kind.STEP)
        for track in timeline.tracks.values()
    ]


def _cut(timeline: Timeline, borders: list[float], end: float, num_steps: int) -> Excerpt:
    start = borders[0]
    rows = {
        resource: tuple(
            span._replace(start_s=span.start_s - start, end_s=span.end_s - start)
            for span in timeline.tracks[resource]
            if span.end_s > start and span.start_s < end
        )
        for resource in _in_reading_order(timeline)[:_MOST_ROWS]
    }
    step_ends = tuple(border - start for border in borders[1:])
    num_rows = len(timeline.tracks)
    return Excerpt(timeline.origin, end - start, rows, step_ends, num_steps, num_rows)


def _in_reading_order(timeline: Timeline) -> list[Resource]:
    """Keep the lanes of a device together, and put the links between devices last."""
    owners = list(dict.fromkeys(resource.owner for resource in timeline.tracks))
    computing = {
        resource.owner
        for resource, track in timeline.tracks.items()
        if any(span.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP) for span in track)
    }
    return sorted(timeline.tracks, key=lambda r: (r.owner not in computing, owners.index(r.owner)))
