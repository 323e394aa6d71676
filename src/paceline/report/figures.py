"""The style and the colours of all figures, and the figures of one step and of learning.

Every text that comes from a file is escaped: plotly reads a subset of HTML in what it draws.
Colours stay apart for colour-blind readers, one for each kind in all figures, after Okabe and Ito's
palette, <https://jfly.uni-koeln.de/color/>. Pairs of kinds (there and back) share a colour and
differ by hatching.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from typing import Any

import plotly.graph_objects as go
from plotly.io import to_json

from paceline.core.compare import Comparison
from paceline.core.outcome import Epoch, Evaluation, is_share
from paceline.core.plan import Kind
from paceline.report.format import duration
from paceline.report.markup import Html, element

_TOP, _BOTTOM = 54, 46  # pixels
MARGINS = _TOP + _BOTTOM
LEFT = 60  # pixels, of most figures
BORDER = "rgba(255,255,255,0.6)"
HOVER = "%{customdata}<extra></extra>"  # the text of each bar, and no box with the trace's name
_GRID = "rgba(128,128,128,0.25)"
_CONFIG = {
    "displayModeBar": False,
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["zoomIn2d", "zoomOut2d", "pan2d", "zoom2d", "resetScale2d"]],
}

TEXT = "#333333"
_VIOLET = "#8f6bc2"
TRAIN = {"line": {"color": _VIOLET, "dash": "dash"}, "marker": {"symbol": "circle-open", "size": 7}}
TEST = {"line": {"color": _VIOLET}, "marker": {"symbol": "circle", "size": 7}}
_YELLOW, _SKY, _BLUE, _GREEN = "#f0e442", "#56b4e9", "#0072b2", "#009e73"
_ORANGE, _VERMILLION, _PURPLE, _WINE = "#e69f00", "#d55e00", "#cc79a7", "#882255"
COLOURS = (_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE, _SKY, _WINE)  # of lines and bars in turn


@dataclass(frozen=True)
class Fill:
    """The fill of a bar, its label, and the colour of text on it."""

    label: str
    colour: str
    hatched: bool = False
    on_it: str = "#000000"

    def marker(self, border: Mapping[str, object]) -> dict[str, Any]:
        """Return plotly's settings for such a bar."""
        marker: dict[str, Any] = {"color": self.colour, "line": dict(border)}
        if self.hatched:
            shape: dict[str, Any] = {"shape": "/", "fillmode": "overlay", "fgcolor": "#ffffff"}
            marker["pattern"] = shape | {"size": 6, "solidity": 0.35}
        return marker

    @property
    def css(self) -> str:
        """The same as a CSS background."""
        if not self.hatched:
            return f"background:{self.colour}"
        stripes = f"{self.colour} 0 2px,#ffffff 2px 4px"
        return f"background:repeating-linear-gradient(135deg,{stripes})"


KINDS: dict[Kind, Fill] = {
    Kind.LOAD: Fill("load", _YELLOW),
    Kind.FORWARD: Fill("forward", _SKY),
    Kind.BACKWARD: Fill("backward", _BLUE, on_it="#ffffff"),
    Kind.TRAIN: Fill("inner steps", _BLUE, hatched=True),
    Kind.ENCODE: Fill("encode", _PURPLE),
    Kind.D2H: Fill("device to host", _ORANGE),
    Kind.SEND: Fill("send", _WINE, on_it="#ffffff"),
    Kind.REDUCE: Fill("reduce", _VERMILLION),
    Kind.H2D: Fill("host to device", _ORANGE, hatched=True),
    Kind.DECODE: Fill("decode", _PURPLE, hatched=True),
    Kind.STEP: Fill("weight update", _GREEN),
}

# By the quantities of a comparison, in the order in which a step goes through them.
PARTS: dict[str, Fill] = {
    "load": KINDS[Kind.LOAD],
    "forward": KINDS[Kind.FORWARD],
    "backward": KINDS[Kind.BACKWARD],
    "train": KINDS[Kind.TRAIN],
    "hidden": Fill("hidden communication", _VERMILLION, hatched=True),
    "exposed": Fill("exposed communication", _VERMILLION),
    "update": KINDS[Kind.STEP],
    "idle": Fill("idle", "#b9bec5"),
}


def escaped(text: object) -> str:
    """Return a text that plotly will not take for markup."""
    return escape(str(text), quote=False)


def unit_of(longest_s: float) -> tuple[str, float]:
    """Return the unit in which an axis up to `longest_s` has readable numbers, and its seconds."""
    if longest_s >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if longest_s >= 1e-3 else ("us", 1e-6)


def styled(figure: go.Figure, height: int, left: int = LEFT) -> go.Figure:
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
    above = {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0}
    return figure.update_layout(
        template="none",
        height=height,
        margin={"l": left, "r": 12, "t": _TOP, "b": _BOTTOM},
        font={"family": "system-ui, sans-serif", "size": 13, "color": TEXT},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend=above | {"traceorder": "normal"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": "#0072b2"},
        hoverlabel={"font": {"color": "#ffffff"}, "bgcolor": "#333333", "align": "left"},
    )


def figure_of(figure: go.Figure, name: str, *, zoomed: bool = False) -> Html:
    """Return the room that the figure takes, and what the page's script will draw there.

    One that is to be `zoomed` has buttons for it, which fingers need.
    """
    config = _CONFIG | ({"displayModeBar": True} if zoomed else {})
    described = to_json(figure.to_dict() | {"config": config}, validate=False)
    return element(
        "figure",
        element("div", id=f"figure-{name}", style=f"height:{figure.layout.height}px"),
        element("script", Html(described), type="application/json"),
        element("noscript", "This figure needs JavaScript."),
    )


_FEW = 15  # points of a curve that are marked
_MOST_TICKS = 8
_FEW_DECADES = 2


def whole_numbers(highest: int, lowest: int = 0) -> dict[str, Any]:
    """Return plotly's settings of an axis of counts: ticks at whole numbers, each once."""
    apart = max(1, -(-(highest - lowest) // _MOST_TICKS))
    magnitude = 10 ** (len(str(apart)) - 1)
    apart = next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= apart)
    return {"tickmode": "linear", "tick0": 0, "dtick": apart, "tickformat": ",d"}


def decades(values: Iterable[float]) -> dict[str, Any]:
    """Return plotly's settings of a logarithmic axis: ticks at 1, 2 and 5 of each decade."""
    found = [value for value in values if value > 0]
    low, high = min(found, default=1.0), max(found, default=1.0)
    below, above = floor(log10(low)), ceil(log10(high))
    digits = (1, 2, 5) if above - below <= _FEW_DECADES else (1,)
    ticks = [digit * 10.0**power for power in range(below, above + 1) for digit in digits]
    shown = [tick for tick in ticks if low / 2 < tick < 2 * high]
    ends = [log10(min(low, shown[0])) - 0.05, log10(max(high, shown[-1])) + 0.05]
    return {
        "type": "log",
        "tickvals": shown,
        "ticktext": [f"{t:,.6g}" for t in shown],
        "range": ends,
    }


def learning_curves(epochs: Sequence[Epoch], score: str) -> go.Figure:
    """Return the losses, and beside them the test accuracy, called `score`, after each epoch."""
    test_score = f"test {escaped(score)}"
    curves = [
        (1, "train loss", [epoch.train_loss for epoch in epochs], TRAIN),
        (1, "test loss", [epoch.test_loss for epoch in epochs], TEST),
    ]
    titles = ["Loss"]
    if any(epoch.score is not None for epoch in epochs):
        curves.append((2, test_score, [epoch.score for epoch in epochs], TEST))
        titles.append(test_score.capitalize())
    figure = go.Figure().set_subplots(
        rows=1, cols=len(titles), subplot_titles=titles, horizontal_spacing=0.09
    )
    numbers = [epoch.number + 1 for epoch in epochs]
    few = len(epochs) <= _FEW
    for column, name, values, style in curves:
        form = ".2%" if column == 2 and is_share(score) else ".4f"
        figure.add_scatter(
            x=numbers,
            y=values,
            name=name,
            mode="lines+markers" if few else "lines",
            hovertemplate=f"epoch %{{x}}: {name} %{{y:{form}}}<extra></extra>",
            showlegend=column == 1,
            row=1,
            col=column,
            **style,
        )
    figure.update_xaxes(title_text="epoch", **whole_numbers(len(numbers)))
    figure.update_xaxes(range=[0.5, len(numbers) + 0.5])
    if len(titles) > 1:
        figure.update_yaxes(tickformat=".2~%" if is_share(score) else ".3~g", col=2)
    return styled(figure, height=300)


def evaluation_curves(evaluations: Sequence[Evaluation], score: str) -> go.Figure:
    """Return the test loss, and beside it the score of that name if there is one, by steps."""
    test_score = f"test {escaped(score)}"
    parts = [("test loss", ".4f", [one.test_loss for one in evaluations])]
    if any(one.score is not None for one in evaluations):
        form = ".2%" if is_share(score) else ".4g"
        parts.append((test_score, form, [one.score for one in evaluations]))
    titles = [name.capitalize() for name, _, _ in parts]
    figure = go.Figure().set_subplots(
        rows=1, cols=len(parts), subplot_titles=titles, horizontal_spacing=0.09
    )
    steps = [one.num_steps for one in evaluations]
    for column, (name, form, values) in enumerate(parts, 1):
        figure.add_scatter(
            x=steps,
            y=values,
            name=name,
            mode="lines+markers" if len(steps) <= _FEW else "lines",
            hovertemplate=f"step %{{x}}: {name} %{{y:{form}}}<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
            **TEST,
        )
    figure.update_xaxes(title_text="step", rangemode="tozero", **whole_numbers(steps[-1]))
    return styled(figure, height=300)


def step_parts(comparison: Comparison) -> go.Figure:
    """Return where a step goes, a stacked bar for each side of the comparison.

    Hidden communication is a thin bar of its own that ends with the backward pass, because it runs
    beside the computation and adds nothing to the step.
    """
    figure = go.Figure()
    seconds = {row.quantity: (row.left_s, row.right_s) for row in comparison.rows}
    unit, factor = unit_of(max((value for pair in seconds.values() for value in pair), default=0.0))
    sides = [escaped(side) for side in (comparison.left, comparison.right)]
    ends: tuple[float, ...] = (0.0, 0.0)
    for quantity, fill in PARTS.items():
        if quantity not in seconds:
            continue
        values = seconds[quantity]
        widths = [0.5 if value else 0 for value in values]
        starts, is_beside = ends, quantity == "hidden"
        if is_beside:
            starts = tuple(max(0.0, end - s) for end, s in zip(ends, values, strict=True))
        else:
            ends = (ends[0] + values[0], ends[1] + values[1])
        figure.add_bar(
            name=fill.label,
            orientation="h",
            y=[0.36, 1.36] if is_beside else [0, 1],
            base=[start / factor for start in starts],
            x=[value / factor for value in values],
            width=0.12 if is_beside else 0.5,
            text=None if is_beside else [duration(value) for value in values],
            customdata=[
                f"{side}: {fill.label} {duration(value)}"
                for side, value in zip(sides, values, strict=True)
            ],
            hovertemplate=HOVER,
            marker=fill.marker({"color": BORDER, "width": widths}),
            textfont={"color": fill.on_it},
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
        )
    totals = [duration(value) for value in seconds.get("step", ends)]
    titles = [f"<b>{side}</b><br>{total}" for side, total in zip(sides, totals, strict=True)]
    figure.update_yaxes(tickvals=[0, 1], ticktext=titles, range=[1.55, -0.4], showgrid=False)
    figure.update_xaxes(title_text=f"time per step, {unit}", rangemode="tozero")
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 11, "mode": "hide"})
    return styled(figure, height=240, left=100).update_layout(margin_t=24)
