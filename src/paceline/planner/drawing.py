"""A predicted timeline as text: one step of each lane, from left to right."""

from collections.abc import Iterable

from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span, Timeline

_WIDTH = 72
_LEGEND = {  # the mark of each kind, and its meaning
    Kind.LOAD: ("L", "load"),
    Kind.FORWARD: ("F", "forward"),
    Kind.BACKWARD: ("B", "backward"),
    Kind.TRAIN: ("T", "steps of its own"),
    Kind.ENCODE: ("e", "encode"),
    Kind.DECODE: ("d", "decode"),
    Kind.D2H: ("<", "to the host"),
    Kind.H2D: (">", "from the host"),
    Kind.SEND: ("=", "send"),
    Kind.REDUCE: ("+", "reduce"),
    Kind.STEP: ("U", "update"),
}


def drawing(timeline: Timeline, step_s: float, most_lanes: int = 24) -> str:
    """Return a step of a predicted timeline, the one before the last: a line for each lane.

    The last line explains the marks. Where updates are not synchronous, the drawing is as long as a
    step and ends with one of them. Of what happens within a character the longest is shown. Lanes
    that are only held beside others are left out, and so are those beyond `most_lanes`; a line says
    how many.
    """
    start, end = some_step(timeline, step_s)
    rows: dict[Resource, list[Span]] = {}
    for resource, track in timeline.tracks.items():
        within = [span for span in track if span.end_s > start and span.start_s < end]
        if within and resource.lane is not Lane.EXCHANGE:
            rows[resource] = within
    shown = list(rows.items())[:most_lanes]
    width = max(len(str(resource)) for resource, _ in shown)
    lines = [f"{resource!s:>{width}} |{_row(spans, start, end)}|" for resource, spans in shown]
    if len(rows) > len(shown):
        lines.append(f"{'':>{width}}  and {len(rows) - len(shown)} lanes more")
    used = {span.kind for _, spans in shown for span in spans}
    legend = ", ".join(" ".join(_LEGEND[kind]) for kind in Kind if kind in used)
    lines.append(f"{'':>{width}}  {(end - start) * 1e3:.4g} ms: {legend}")
    return "\n".join(lines)


def some_step(timeline: Timeline, step_s: float) -> tuple[float, float]:
    """Return start and end of a step in the steady state, which asynchronous workers may leave."""
    updates = [span.end_s for span in timeline.spans if span.kind is Kind.STEP]
    wanted = timeline.end_s - step_s
    end = min(updates, key=lambda time: abs(time - wanted), default=timeline.end_s)
    return max(end - step_s, timeline.start_s), end


def _row(spans: Iterable[Span], start: float, end: float) -> str:
    """Return a character for each part of the time: the kind that takes most of it, or a dot."""
    size = (end - start) / _WIDTH
    taken: list[dict[str, float]] = [{} for _ in range(_WIDTH)]
    for span in spans:
        first = max(0, int((span.start_s - start) / size))
        last = min(_WIDTH - 1, int((span.end_s - start) / size))
        for place in range(first, last + 1):
            left, right = start + place * size, start + (place + 1) * size
            within = min(span.end_s, right) - max(span.start_s, left)
            mark, _ = _LEGEND[span.kind]
            taken[place][mark] = taken[place].get(mark, 0.0) + within
    # What takes less than a tenth of a character's time would look ten times as long.
    return "".join(
        max(marks, key=marks.__getitem__) if sum(marks.values()) > 0.1 * size else "."
        for marks in taken
    )
