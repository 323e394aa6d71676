"""Draw the steps of timelines: two steps in detail, and the duration of every step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Origin, Span, Timeline
from paceline.report import figures
from paceline.report.figures import Described, Panel
from paceline.report.format import duration

_NUM_STEPS = 2
_MOST_ROWS = 40
_GAP = 58  # pixels between two panels, including the lower panel's title
_MOST_LINES = 8
_MOST_POINTS = 1000  # maximum points of a line
_FEWEST = 4  # draw a timeline only if a device has at least this many steps


@dataclass(frozen=True)
class Excerpt:
    """An excerpt of a timeline with a few steps of one device.

    All times are in seconds from the start of the excerpt. Spans that extend beyond the excerpt are
    not clipped. `step_ends_s`: when each step's weight update ends. `rows`: spans by resource, for
    at most _MOST_ROWS resources. `title`: such as "measured: 2 of 20 steps".
    """

    title: str
    length_s: float
    rows: dict[Resource, tuple[Span, ...]]
    step_ends_s: tuple[float, ...]


def excerpt(timeline: Timeline) -> Excerpt:
    """Return two consecutive steps from the middle of the timeline.

    The device with the most weight updates determines the steps, because two steps of a slow device
    may contain hundreds of steps of a fast one. If no device has two updates, the excerpt is the
    whole timeline.
    """
    tracks = timeline.tracks
    steps = [
        sorted(one.end_s for one in track if one.kind is Kind.STEP) for track in tracks.values()
    ]
    ends: list[float] = max(steps, key=len, default=[])
    if len(ends) < 2:
        borders, end = [timeline.start_s], timeline.end_s
    else:
        first = max(0, (len(ends) - _NUM_STEPS - 1) // 2)
        borders = ends[first : first + _NUM_STEPS + 1]
        end = borders[-1]
    start = borders[0]
    # Order the rows: first devices that compute, each with all its lanes, then links.
    owners = list(dict.fromkeys(resource.owner for resource in tracks))
    computes = {Kind.FORWARD, Kind.BACKWARD, Kind.TRAIN, Kind.STEP}
    computing = {r.owner for r, track in tracks.items() if computes & {one.kind for one in track}}
    ordered = sorted(tracks, key=lambda r: (r.owner not in computing, owners.index(r.owner)))
    rows = {
        resource: tuple(
            span._replace(start_s=span.start_s - start, end_s=span.end_s - start)
            for span in tracks[resource]
            if span.end_s > start and span.start_s < end
        )
        for resource in ordered[:_MOST_ROWS]
    }
    step_ends = tuple(border - start for border in borders[1:])
    title = f"{len(step_ends)} of {len(ends)} steps" if step_ends else "the whole timeline"
    title += f", {len(rows)} of {len(tracks)} rows" if len(rows) < len(tracks) else ""
    return Excerpt(f"{timeline.origin}: {title}", end - start, rows, step_ends)


def two_steps(timelines: Sequence[Timeline]) -> dict[str, Any] | None:
    """Draw two steps of each timeline; return the "figure" and its legend's colours ("fills").

    Returns None if no timeline has spans.
    """
    excerpts = [excerpt(timeline) for timeline in timelines if timeline.spans]
    if not excerpts:
        return None
    figure = steps_in_time(excerpts)
    labels = {bar["name"] for bar in figure["data"]}
    fills = [fill for fill in figures.KINDS.values() if fill.label in labels]
    return {"figure": figure, "fills": fills}


def steps_in_time(excerpts: Sequence[Excerpt]) -> Described:
    """Draw excerpts one below the other on one time scale, with a row for each resource."""
    rows = [len(excerpt.rows) for excerpt in excerpts]
    bodies = [(28 if max(rows) <= 12 else 19) * n for n in rows]
    inner = sum(bodies) + (len(excerpts) - 1) * _GAP
    longest = max(excerpt.length_s for excerpt in excerpts)
    unit, factor = figures.unit_of(longest)
    panels = []
    for number, shown in enumerate(excerpts, 1):
        x: Described = {"title": f"time, {unit}" if number == len(excerpts) else ""}
        x |= {"range": [0, 1.002 * longest / factor]} | ({"matches": "x"} if number > 1 else {})
        names = list(map(figures.escaped, shown.rows))
        y: Described = {"type": "category", "categoryorder": "array", "categoryarray": names}
        y |= {"range": [len(names) - 0.5, -0.5], "showgrid": False, "fixedrange": True}
        marks = [end / factor for end in shown.step_ends_s]
        title = f"<b>{shown.title}</b>, {duration(shown.length_s)}"
        panels.append(Panel(list(_bars(shown, factor)), x, y, title, marks))
    how: Described = {"barmode": "overlay", "hovermode": "closest", "showlegend": False}
    how |= {"heights": bodies, "gap": _GAP / inner, "margin": {"l": 10}, "is_zoomed": True}
    return figures.figure_of(panels, inner + figures.MARGINS, **how)


def _bars(shown: Excerpt, factor: float) -> Iterator[Described]:
    """Yield a plotly trace of bars for each kind of task, clipped to the excerpt.

    `factor`: the x axis's unit in seconds.
    """
    for kind, fill in figures.KINDS.items():
        pairs = [(row, s) for row, spans in shown.rows.items() for s in spans if s.kind is kind]
        if not pairs:
            continue
        starts = [max(0.0, span.start_s) for _, span in pairs]
        ends = [min(shown.length_s, span.end_s) for _, span in pairs]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        # Narrow bars have no border, because it would hide them.
        widths = [0.5 if length > 0.004 * shown.length_s else 0 for length in lengths]
        yield figures.bars_along(
            fill,
            [round(length / factor, 5) for length in lengths],
            [f"{figures.escaped(s.name)}<br>{duration(s.duration_s)}" for _, s in pairs],
            base=[round(start / factor, 5) for start in starts],
            y=[figures.escaped(row) for row, _ in pairs],
            width=0.72,
            marker=fill.marker({"color": figures.BORDER, "width": widths}),
        )


def through_time(timelines: Sequence[Timeline]) -> Iterator[dict[str, Any]]:
    """Draw the duration of every step by device, for each measured or rehearsed timeline.

    Yields dicts with the "figure" and with the values that run.html shows above the figure.
    """
    for timeline in [one for one in timelines if one.origin is not Origin.PREDICTED]:
        seconds = {
            device: [end - start for start, end in steps]
            for device, steps in timeline.steps().items()
        }
        if max(map(len, seconds.values()), default=0) < _FEWEST:
            continue
        every = [value for values in seconds.values() for value in values]
        drawn = dict(list(seconds.items())[:_MOST_LINES])
        yield {
            "origin": timeline.origin,
            "median_s": median(every),
            "longest_s": max(every),
            "drawn": len(drawn),
            "devices": len(seconds),
            "is_thinned": max(map(len, drawn.values())) > _MOST_POINTS,
            "figure": _lines(drawn),
        }


def _lines(seconds: Mapping[str, Sequence[float]]) -> Described:
    unit, factor = figures.unit_of(max(max(values) for values in seconds.values()))
    lines = []
    for i, (device, values) in enumerate(seconds.items()):
        numbers, longest = thinned(values, _MOST_POINTS)
        times = [round(value / factor, 4) for value in longest]
        hover = f"{figures.escaped(device)}, step %{{x}}: %{{y:.3~g}} {unit}<extra></extra>"
        lines.append(figures.line(i, device, numbers, times, hovertemplate=hover))
    x = {"title": "step"} | figures.whole_numbers(max(map(len, seconds.values())))
    panel = Panel(lines, x, {"title": f"time, {unit}", "rangemode": "tozero"})
    below = figures.LEGEND | {"y": 0, "yanchor": "bottom"}  # zoom buttons are at the top
    margin = {"t": 34, "b": 84}
    return figures.figure_of([panel], 300, margin=margin, is_zoomed=True, legend=below)


def thinned(values: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """Replace groups of adjacent values by their maxima, so that at most `most` values remain.

    Returns two lists: the positions of the maxima, counted from 1, and their values.
    """
    size = -(-len(values) // most)
    numbers = [
        max(range(first, min(first + size, len(values))), key=values.__getitem__)
        for first in range(0, len(values), size)
    ]
    return [number + 1 for number in numbers], [values[number] for number in numbers]
