"""Draw one step of a predicted timeline as text."""

from collections.abc import Iterable

from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span, Timeline

_WIDTH, _MOST_LANES = 72, 24
_LEGEND = {  # for each kind of task: its character in the drawing, and its name
    Kind.LOAD: ("L", "load"),
    Kind.FORWARD: ("F", "forward"),
    Kind.BACKWARD: ("B", "backward"),
    Kind.TRAIN: ("T", "local steps"),
    Kind.ENCODE: ("e", "encode"),
    Kind.DECODE: ("d", "decode"),
    Kind.D2H: ("<", "to the host"),
    Kind.H2D: (">", "from the host"),
    Kind.SEND: ("=", "send"),
    Kind.REDUCE: ("+", "reduce"),
    Kind.STEP: ("U", "update"),
}


def drawing(timeline: Timeline, step_s: float) -> str:
    """Draw the second-to-last step, with a line of text for each resource.

    A resource is a link, or a unit of a device, such as a copy engine. A line has 72 characters,
    each for an equal part of the step. Of more than 24 resources, 24 are drawn and the others
    counted. A step here is the time between two weight updates.
    """
    start, end = some_step(timeline, step_s)
    rows: dict[Resource, list[Span]] = {}
    for resource, track in timeline.tracks.items():
        within = [span for span in track if span.end_s > start and span.start_s < end]
        if within and resource.lane is not Lane.EXCHANGE:
            rows[resource] = within
    shown = list(rows.items())[:_MOST_LANES]
    width = max(len(str(resource)) for resource, _ in shown)
    lines = [f"{resource!s:>{width}} |{_row(spans, start, end)}|" for resource, spans in shown]
    if len(rows) > len(shown):
        lines.append(f"{'':>{width}}  and {len(rows) - len(shown)} more lanes")
    used = {span.kind for _, spans in shown for span in spans}
    legend = ", ".join(" ".join(_LEGEND[kind]) for kind in Kind if kind in used)
    lines.append(f"{'':>{width}}  {(end - start) * 1e3:.4g} ms: {legend}")
    return "\n".join(lines)


def some_step(timeline: Timeline, step_s: float) -> tuple[float, float]:
    """Return the start and the end of the second-to-last step, in seconds."""
    updates = [span.end_s for span in timeline.spans if span.kind is Kind.STEP]
    wanted = timeline.end_s - step_s
    end = min(updates, key=lambda time: abs(time - wanted), default=timeline.end_s)
    return max(end - step_s, timeline.start_s), end


def _row(spans: Iterable[Span], start: float, end: float) -> str:
    """Draw a resource's spans as 72 characters, each for an equal part of the step.

    A character stands for the kind of task that takes longest in its part; a dot means idle.
    """
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
    # Draw a dot if tasks take less than a tenth of the time that a character represents.
    return "".join(
        max(marks, key=marks.__getitem__) if sum(marks.values()) > 0.1 * size else "."
        for marks in taken
    )
