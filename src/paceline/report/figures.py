"""The figures of the report, as plotly draws them.

Every text that comes from a file is escaped: plotly reads a subset of HTML in what it draws.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import plotly.graph_objects as go

from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Span
from paceline.report.excerpt import Excerpt
from paceline.report.format import duration
from paceline.report.palette import KINDS, PARTS, TEST, TEXT, TRAIN, Fill
from paceline.result import ComparisonTable, EpochRow

_TITLE, _GAP, _TOP, _BOTTOM = 24, 34, 30, 46  # pixels
_GRID = "rgba(128,128,128,0.25)"
_BORDER = "rgba(255,255,255,0.6)"


def learning_curves(epochs: Sequence[EpochRow], score: str) -> go.Figure:
    """Return the losses and, beside them, the test accuracy after each epoch.

    `score` is what the accuracy is called.
    """
    test_score = f"test {escape(score, quote=False)}"
    figure = go.Figure().set_subplots(
        rows=1, cols=2, subplot_titles=("Loss", test_score.capitalize()), horizontal_spacing=0.09
    )
    numbers = [epoch.number + 1 for epoch in epochs]
    few = len(epochs) <= 15
    for column, name, values, style in (
        (1, "train loss", [epoch.train_loss for epoch in epochs], TRAIN),
        (1, "test loss", [epoch.test_loss for epoch in epochs], TEST),
        (2, test_score, [epoch.accuracy for epoch in epochs], TEST),
    ):
        form = ".2%" if column == 2 else ".4f"
        template = f"epoch %{{x}}: {name} %{{y:{form}}}<extra></extra>"
        line = go.Scatter(
            x=numbers,
            y=values,
            name=name,
            mode="lines+markers" if few else "lines",
            hovertemplate=template,
            **style,
        )
        figure.add_trace(line.update(showlegend=column == 1), row=1, col=column)
    figure.update_xaxes(
        title_text="epoch",
        range=[0.5, len(numbers) + 0.5],
        tickmode="linear" if few else "auto",
        tickformat="d",
    )
    figure.update_yaxes(tickformat=".2~%", col=2)
    return styled(figure, height=300, left=60)


def step_parts(comparison: ComparisonTable) -> go.Figure:
    """Return where a step goes, a stacked bar for each side of the comparison.

    Hidden communication is a thin bar of its own that ends with the backward pass, because it runs
    beside the computation and adds nothing to the step.
    """
    figure = go.Figure()
    seconds = {row.quantity: (row.left_s, row.right_s) for row in comparison.rows}
    unit, factor = unit_of(max((v for pair in seconds.values() for v in pair), default=0.0))
    sides = [escape(side, quote=False) for side in (comparison.left, comparison.right)]
    ends = (0.0, 0.0)
    for quantity, fill in PARTS.items():
        values = seconds.get(quantity, (0.0, 0.0))
        if quantity == "hidden":
            starts = [max(0.0, end - value) for end, value in zip(ends, values, strict=True)]
            bars = _part(fill, starts, values, sides, factor).update(y=[0.36, 1.36], width=0.12)
        else:
            bars = _part(fill, ends, values, sides, factor)
            bars.update(text=[duration(value) for value in values])
            ends = (ends[0] + values[0], ends[1] + values[1])
        figure.add_trace(bars)
    totals = [duration(value) for value in seconds.get("step", ends)]
    figure.update_yaxes(
        tickvals=[0, 1],
        ticktext=[f"<b>{side}</b><br>{t}" for side, t in zip(sides, totals, strict=True)],
        range=[1.55, -0.4],
        showgrid=False,
    )
    figure.update_xaxes(title_text=f"time per step, {unit}", rangemode="tozero")
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 11, "mode": "hide"})
    return styled(figure, height=240, left=100).update_layout(margin_t=24)


def _part(
    fill: Fill,
    starts: Sequence[float],
    values: Sequence[float],
    sides: Sequence[str],
    factor: float,
) -> go.Bar:
    """Return one part of a step on both sides."""
    return go.Bar(
        name=fill.label,
        orientation="h",
        y=[0, 1],
        base=[start / factor for start in starts],
        x=[value / factor for value in values],
        width=0.5,
        customdata=[
            f"{side}: {fill.label} {duration(value)}"
            for side, value in zip(sides, values, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        marker=fill.marker({"color": _BORDER, "width": [0.5 if value else 0 for value in values]}),
        textfont={"color": fill.on_it},
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
    )


def steps_in_time(excerpts: Sequence[Excerpt]) -> go.Figure:
    """Return the excerpts below one another, on one scale of time, a row for each resource."""
    rows = [len(excerpt.rows) for excerpt in excerpts]
    bodies = [(28 if max(rows) <= 12 else 19) * n for n in rows]
    inner = sum(bodies) + (len(excerpts) - 1) * (_GAP + _TITLE)
    figure = go.Figure().set_subplots(
        rows=len(excerpts),
        cols=1,
        shared_xaxes=True,
        row_heights=bodies,
        vertical_spacing=(_GAP + _TITLE) / inner if len(excerpts) > 1 else 0,
        subplot_titles=[f"<b>{e.title}</b>, {duration(e.length_s)}" for e in excerpts],
    )
    longest = max(excerpt.length_s for excerpt in excerpts)
    unit, factor = unit_of(longest)
    named: set[Kind] = set()
    for number, excerpt in enumerate(excerpts, start=1):
        for kind, bars in _bars(excerpt, factor):
            bars.update(showlegend=kind not in named)
            figure.add_trace(bars, row=number, col=1)
            named.add(kind)
        for end in excerpt.step_ends_s:
            line = {"color": "#888888", "width": 1, "dash": "dot"}
            figure.add_vline(end / factor, line=line, row=number, col=1)
        names = [_name(resource) for resource in excerpt.rows]
        figure.update_yaxes(categoryarray=names, range=[len(names) - 0.5, -0.5], row=number, col=1)
    figure.update_yaxes(type="category", categoryorder="array", showgrid=False, fixedrange=True)
    figure.update_xaxes(range=[0, 1.002 * longest / factor], showticklabels=True)
    figure.update_xaxes(title_text=f"time, {unit}", row=len(excerpts), col=1)
    figure.update_annotations(x=0, xanchor="left", xshift=-60)  # above the rows' names
    figure.update_layout(barmode="overlay", hovermode="closest", legend={"itemwidth": 30})
    return styled(figure, height=inner + _TOP + _TITLE + _BOTTOM, left=10)


def _bars(excerpt: Excerpt, factor: float) -> Iterator[tuple[Kind, go.Bar]]:
    """Yield the bars of each kind, cut off at the ends of the excerpt."""
    for kind, fill in KINDS.items():
        pairs = [
            (resource, span)
            for resource, spans in excerpt.rows.items()
            for span in spans
            if span.kind is kind
        ]
        if not pairs:
            continue
        starts = [max(0.0, span.start_s) for _, span in pairs]
        ends = [min(excerpt.length_s, span.end_s) for _, span in pairs]
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        # Borders would cover bars that are hardly wider than themselves.
        widths = [0.5 if length > 0.004 * excerpt.length_s else 0 for length in lengths]
        yield (
            kind,
            go.Bar(
                name=fill.label,
                legendgroup=kind.value,
                orientation="h",
                base=[round(start / factor, 5) for start in starts],
                x=[round(length / factor, 5) for length in lengths],
                y=[_name(resource) for resource, _ in pairs],
                width=0.72,
                customdata=[_hover(span) for _, span in pairs],
                hovertemplate="%{customdata}<extra></extra>",
                marker=fill.marker({"color": _BORDER, "width": widths}),
            ),
        )


def _hover(span: Span) -> str:
    return f"{escape(span.name, quote=False)}<br>{duration(span.duration_s)}"


def _name(resource: Resource) -> str:
    return escape(str(resource), quote=False)


def unit_of(longest_s: float) -> tuple[str, float]:
    """Return the unit in which an axis up to `longest_s` has readable numbers, and its seconds."""
    if longest_s >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if longest_s >= 1e-3 else ("us", 1e-6)


def styled(figure: go.Figure, height: int, left: int) -> go.Figure:
    """Return the figure in the style that all have; `height` and `left` margin in pixels."""
    axis: Mapping[str, object] = {
        "title_font_size": 13,
        "title_standoff": 8,
        "gridcolor": _GRID,
        "zeroline": False,
        "linecolor": _GRID,
        "automargin": True,
    }
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    figure.update_annotations(font_size=14)
    return figure.update_layout(
        template="none",
        height=height,
        margin={"l": left, "r": 12, "t": _TOP + _TITLE, "b": _BOTTOM},
        font={"family": "system-ui, sans-serif", "size": 13, "color": TEXT},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 1,
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": "#0072b2"},
        hoverlabel={"font": {"color": "#ffffff"}, "bgcolor": "#333333", "align": "left"},
    )
