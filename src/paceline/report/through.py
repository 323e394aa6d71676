"""How long each recorded step took, from the first to the last."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import median

import plotly.graph_objects as go

from paceline.core.plan import Kind
from paceline.core.timeline import Timeline
from paceline.report.figures import styled, unit_of
from paceline.report.format import duration
from paceline.report.markup import Html
from paceline.report.sections import figure_of, section

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DASHES = ("solid", "dot", "dash", "dashdot")
_MOST_LINES = 8
_MOST_POINTS = 1000  # of a line
_FEWEST = 4
_HEIGHT, _LEFT = 300, 60  # pixels


def through_time(timelines: Sequence[Timeline]) -> Iterator[Html]:
    """Yield the steps of what happened, a line for each device, if there are enough of them."""
    happened = [timeline for timeline in timelines if timeline.origin != "predicted"]
    for timeline in happened:
        seconds = step_seconds(timeline)
        if max(map(len, seconds.values()), default=0) >= _FEWEST:
            yield _section(timeline, seconds)


def step_seconds(timeline: Timeline) -> dict[str, list[float]]:
    """Return for each device that updates twice the seconds of its steps, in their order."""
    ends: dict[str, list[float]] = {}
    for span in timeline.spans:
        if span.kind is Kind.STEP:
            ends.setdefault(span.on[0].owner, []).append(span.end_s)
    return {
        device: [late - early for early, late in pairwise(sorted(times))]
        for device, times in ends.items()
        if len(times) > 1
    }


def _section(timeline: Timeline, seconds: Mapping[str, Sequence[float]]) -> Html:
    every = [value for values in seconds.values() for value in values]
    shown = dict(list(seconds.items())[:_MOST_LINES])
    left_out = f" The first {_MOST_LINES} of {len(seconds)} devices." * (len(shown) < len(seconds))
    note = (
        f"The steps that were recorded, from one weight update to the next: half of them took up to"
        f" {duration(median(every))}, the longest {duration(max(every))}.{left_out}"
    )
    if max(map(len, shown.values())) > _MOST_POINTS:
        note += " A point is the longest of several steps."
    drawn = figure_of(_figure(shown), f"through-{timeline.origin}", zoomed=True)
    return section(f"Steps one by one, {timeline.origin}", note, drawn)


def _figure(seconds: Mapping[str, Sequence[float]]) -> go.Figure:
    unit, factor = unit_of(max(max(values) for values in seconds.values()))
    figure = go.Figure()
    for i, (device, values) in enumerate(seconds.items()):
        numbers, longest = thinned(values, _MOST_POINTS)
        name = escape(device, quote=False)
        figure.add_trace(
            go.Scatter(
                x=numbers,
                y=[round(value / factor, 4) for value in longest],
                name=name,
                mode="lines",
                line={
                    "width": 1.5,
                    "color": _COLOURS[i % len(_COLOURS)],
                    "dash": _DASHES[i % len(_DASHES)],
                },
                hovertemplate=f"{name}, step %{{x}}: %{{y:.3~g}} {unit}<extra></extra>",
            )
        )
    figure.update_xaxes(title_text="step", tickformat="d")
    figure.update_yaxes(title_text=f"time, {unit}", rangemode="tozero")
    # The buttons are above.
    below = {"y": 0, "yanchor": "bottom"}
    return styled(figure, _HEIGHT, _LEFT).update_layout(legend=below, margin={"t": 34, "b": 84})


def thinned(values: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """Return at most so many of the values, each the largest among neighbours, and their numbers.

    Numbers count from 1.
    """
    size = -(-len(values) // most)
    numbers = [
        max(range(first, min(first + size, len(values))), key=values.__getitem__)
        for first in range(0, len(values), size)
    ]
    return [number + 1 for number in numbers], [values[number] for number in numbers]
