"""Build figures for plotly.js: the common style, step breakdowns and learning curves.

A figure is a dict of traces, layout and configuration with the keys of
<https://plotly.com/javascript/reference/>. Plotly interprets some HTML in texts, so every text that
comes from a file must be `escaped`.

Each kind of task has the same colour in all figures. The colours are from the palette of Okabe and
Ito, <https://jfly.uni-koeln.de/color/>, which colour-blind readers can distinguish. Related
kinds, such as encode and decode, share a colour and differ by hatching.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from math import ceil, floor, log10
from typing import Any

from paceline.core.outcome import Epoch, is_share
from paceline.core.plan import Kind
from paceline.report.format import duration, share

Described = dict[str, Any]
"""A figure, or a part of a figure such as a trace or an axis, as plotly's JSON."""

LEFT = 60  # left margin of a figure in pixels
_MARGIN = {"l": LEFT, "r": 12, "t": 54, "b": 46}
MARGINS = _MARGIN["t"] + _MARGIN["b"]
BORDER = "rgba(255,255,255,0.6)"
HOVER = "%{customdata}<extra></extra>"  # hover text: shows only `customdata`, not the trace's name
_GRID = "rgba(128,128,128,0.25)"
_LINE = {"color": "#888888", "width": 1, "dash": "dot"}
_CONFIG = {
    "displayModeBar": False,
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["zoomIn2d", "zoomOut2d", "pan2d", "zoom2d", "resetScale2d"]],
}

_ABOVE = {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top", "x": 0}
LEGEND = _ABOVE | {"traceorder": "normal"}
_LAYOUT: dict[str, Any] = {
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#333333"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "legend": LEGEND,
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#888888", "activecolor": "#0072b2"},
    "hoverlabel": {"font": {"color": "#ffffff"}, "bgcolor": "#333333", "align": "left"},
}
_VIOLET = "#8f6bc2"
_TRAIN = {
    "line": {"color": _VIOLET, "dash": "dash"},
    "marker": {"symbol": "circle-open", "size": 7},
}
_TEST = {"line": {"color": _VIOLET}, "marker": {"symbol": "circle", "size": 7}}
_YELLOW, _SKY, _BLUE, _GREEN = "#f0e442", "#56b4e9", "#0072b2", "#009e73"
_ORANGE, _VERMILLION, _PURPLE, _WINE = "#e69f00", "#d55e00", "#cc79a7", "#882255"
COLOURS = (_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE, _SKY, _WINE)  # for lines and bars
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star")


@dataclass(frozen=True)
class Fill:
    """The fill of a kind of bar, with its label and the colour of text on the bar (`on_it`)."""

    label: str
    colour: str
    hatched: bool = False
    on_it: str = "#000000"

    def marker(self, border: Mapping[str, object]) -> dict[str, Any]:
        """Return the plotly marker of a bar with this fill; `border`: plotly's `marker.line`."""
        marker: dict[str, Any] = {"color": self.colour, "line": dict(border)}
        if self.hatched:
            shape: dict[str, Any] = {"shape": "/", "fillmode": "overlay", "fgcolor": "#ffffff"}
            marker["pattern"] = shape | {"size": 6, "solidity": 0.35}
        return marker

    @property
    def css(self) -> str:
        """The fill as a CSS `background` property."""
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

# The parts of a step, in the order in which they run.
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
    """Escape a text so that plotly does not interpret it as markup."""
    return escape(str(text), quote=False)


def unit_of(longest_s: float) -> tuple[str, float]:
    """Choose the unit of a time axis: s, ms or us; return its name and its length in seconds."""
    if longest_s >= 1:
        return "s", 1.0
    return ("ms", 1e-3) if longest_s >= 1e-3 else ("us", 1e-6)


@dataclass(frozen=True)
class Panel:
    """A subplot: a pair of axes with traces.

    `x`, `y`: settings of the axes with plotly's keys, but with a plain str as `title`. `title`:
    title of the panel, in plotly's markup. `marks`: x coordinates of vertical dotted lines.
    """

    traces: Sequence[Described]
    x: Described = field(default_factory=dict)
    y: Described = field(default_factory=dict)
    title: str = ""
    marks: Sequence[float] = ()


def figure_of(
    panels: Sequence[Panel],
    height: float,
    *,
    heights: Sequence[float] = (),
    gap: float = 0.0,
    margin: Mapping[str, int] | None = None,
    is_zoomed: bool = False,
    **layout: Any,
) -> Described:
    """Build a figure of panels in the style that all figures share.

    `height`: in pixels. `heights`: relative heights of panels in a column; without `heights`, the
    panels form a row. `gap`: distance between two panels, as a fraction of the figure. `margin`:
    margins in pixels by plotly's keys. `is_zoomed`: show zoom buttons, which touch screens need.
    """
    domains = _domains(heights or [1] * len(panels), gap)
    figure: Described = {"data": [], "layout": _LAYOUT | {"height": height} | layout}
    figure["config"] = _CONFIG | ({"displayModeBar": True} if is_zoomed else {})
    whole = figure["layout"]
    whole |= {"margin": _MARGIN | dict(margin or {}), "annotations": [], "shapes": []}
    for number, (panel, (low, high)) in enumerate(zip(panels, domains, strict=True), 1):
        suffix = str(number) if number > 1 else ""
        x, y = f"x{suffix}", f"y{suffix}"
        across, up = ([0, 1], [1 - high, 1 - low]) if heights else ([low, high], [0, 1])
        whole[f"xaxis{suffix}"] = _axis(panel.x) | {"domain": across, "anchor": y}
        whole[f"yaxis{suffix}"] = _axis(panel.y) | {"domain": up, "anchor": x}
        figure["data"] += [{**trace, "xaxis": x, "yaxis": y} for trace in panel.traces]
        if panel.title:
            whole["annotations"].append(_title(panel.title, across, up[1], is_left=is_zoomed))
        for at in panel.marks:
            ends = {"x0": at, "x1": at, "y0": 0, "y1": 1, "xref": x, "yref": f"{y} domain"}
            whole["shapes"].append({"type": "line", "line": _LINE} | ends)
    return figure


def bars_along(
    fill: Fill, seconds: Sequence[float], told: Sequence[str], **settings: Any
) -> Described:
    """Build a plotly trace of horizontal bars with the same fill.

    `seconds`: lengths of the bars, converted to the axis's unit of time. `told`: hover texts.
    """
    bars = {"type": "bar", "name": fill.label, "orientation": "h", "x": seconds}
    return bars | {"customdata": told, "hovertemplate": HOVER} | settings


def line(number: int, name: str, x: object, y: object, **settings: Any) -> Described:
    """Build a plotly trace that is a line; `number` selects colour, dash and symbol."""
    style = {"color": COLOURS[number % len(COLOURS)], "dash": _DASHES[number % len(_DASHES)]}
    marker = {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 8}
    drawn = {"type": "scatter", "mode": "lines", "name": escaped(name), "x": x, "y": y}
    return drawn | {"line": style, "marker": marker} | settings


def _domains(sizes: Sequence[float], gap: float) -> list[tuple[float, float]]:
    """Return the start and end of each panel as fractions of the figure; `sizes` are relative."""
    room = (1 - gap * (len(sizes) - 1)) / sum(sizes)
    starts = accumulate((size * room + gap for size in sizes[:-1]), initial=0.0)
    return [(start, start + size * room) for start, size in zip(starts, sizes, strict=True)]


def _axis(settings: Described) -> Described:
    title = {"text": settings.get("title", ""), "font": {"size": 13}, "standoff": 8}
    lines = {"gridcolor": _GRID, "zeroline": False, "linecolor": _GRID, "automargin": True}
    return lines | settings | {"title": title}


def _title(text: str, across: Sequence[float], top: float, *, is_left: bool) -> Described:
    """Return a panel's title as a plotly annotation: centred, or at the left edge if `is_left`.

    `across`: left and right end of the panel. `top`: upper end. All are fractions of the figure.
    """
    place: Described = {"x": sum(across) / 2, "xanchor": "center"}
    if is_left:
        place = {"x": 0, "xanchor": "left", "xshift": -LEFT}
    place |= {"y": top, "yanchor": "bottom", "xref": "paper", "yref": "paper"}
    return {"text": text, "font": {"size": 14}, "showarrow": False} | place


_FEW = 15  # maximum points of a curve that is drawn with markers
_MOST_TICKS = 8
_FEW_DECADES = 2


def whole_numbers(highest: int) -> dict[str, Any]:
    """Return plotly settings for an axis of counts up to `highest`, with ticks at whole numbers."""
    apart = max(1, -(-highest // _MOST_TICKS))
    magnitude = 10 ** (len(str(apart)) - 1)
    apart = next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= apart)
    return {"tickmode": "linear", "tick0": 0, "dtick": apart, "tickformat": ",d"}


def decades(values: Iterable[float]) -> dict[str, Any]:
    """Return plotly settings for a logarithmic axis that covers `values`.

    Ticks are at 1, 2 and 5 of each decade, or at 1 only if there are many decades.
    """
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


def losses_of(epochs: Iterable[Epoch]) -> dict[str, list[float | None]]:
    """Return two lists by name, "train loss" and "test loss", with a loss for each epoch."""
    pairs = [(epoch.train_loss, epoch.test_loss) for epoch in epochs]
    return {"train loss": [one for one, _ in pairs], "test loss": [one for _, one in pairs]}


def learning_curves(
    by: str,
    places: Sequence[float],
    axis: Described,
    losses: Mapping[str, Sequence[float | None]],
    score: str = "",
    scores: Sequence[float | None] = (),
) -> Described:
    """Draw losses against epochs, steps or seconds, and test scores in a second panel.

    `by`: title of the x axis. `places`: x coordinates. `axis`: plotly settings of the x axis.
    `losses`: each curve's name and values. `score`: name of the score. Without `scores`, the figure
    has only the first panel.
    """
    x = {"title": by} | axis
    mode = "lines+markers" if len(places) <= _FEW else "lines"

    def curve(name: str, values: Sequence[float | None], form: str, legend: bool) -> Described:
        style = _TRAIN if name == "train loss" else _TEST
        hover = f"{by} %{{x}}: {name} %{{y:{form}}}<extra></extra>"
        drawn = {"type": "scatter", "x": places, "y": values, "name": name, "mode": mode}
        return drawn | {"hovertemplate": hover, "showlegend": legend} | style

    traces = [curve(name, values, ".4f", len(losses) > 1) for name, values in losses.items()]
    panels = [Panel(traces, x, title="Loss")]
    if any(value is not None for value in scores):
        form, ticks = (".2%", ".2~%") if is_share(score) else (".4g", ".3~g")
        name = f"test {escaped(score)}"
        traces = [curve(name, scores, form, False)]
        panels.append(Panel(traces, x, {"tickformat": ticks}, name.capitalize()))
    return figure_of(panels, 300, gap=0.09)


def share_bars(groups: Mapping[str, Mapping[str, float | None]]) -> Described:
    """Draw fractions as horizontal bars; the bars of a group have one colour.

    `groups`: for each group's name, the fractions by row name; None draws no bar.
    """
    bars = []
    for i, (name, shares) in enumerate(groups.items()):
        values = list(shares.values())
        bar: Described = {"type": "bar", "orientation": "h", "name": escaped(name)}
        bar |= {"x": values, "y": list(map(escaped, shares))}
        bar |= {"text": [None if one is None else share(one) for one in values]}
        bars.append(bar | {"marker": {"color": COLOURS[i % len(COLOURS)]}})
    height = 100 + 24 * max(map(len, groups.values()), default=0) * (1 + len(groups))
    x = {"range": [0, 1.05], "tickformat": ".0~%"}
    return figure_of([Panel(bars, x, {"autorange": "reversed"})], height, margin={"l": 120})


def step_parts(sides: Mapping[str, Mapping[str, float]]) -> Described:
    """Draw the parts of a step, such as "forward", as one stacked bar for each row of `sides`.

    `sides`: for each row's name, the seconds by part; the optional key "step" has the seconds of
    the whole step. Hidden communication is a separate thin bar that ends with the backward pass,
    because hidden communication adds nothing to the step.
    """
    unit, factor = unit_of(max((s for parts in sides.values() for s in parts.values()), default=0))
    names, rows = list(map(escaped, sides)), list(range(len(sides)))
    ends, bars = [0.0 for _ in sides], []
    for part, fill in PARTS.items():
        if not any(part in parts for parts in sides.values()):
            continue
        values, starts = [parts.get(part, 0.0) for parts in sides.values()], ends
        texts = [duration(value) for value in values]
        if part == "hidden":
            starts = [max(0.0, end - s) for end, s in zip(ends, values, strict=True)]
            place: Described = {"y": [row + 0.36 for row in rows], "width": 0.12}
        else:
            ends = [end + s for end, s in zip(ends, values, strict=True)]
            place = {"y": rows, "width": 0.5, "text": texts, "textfont": {"color": fill.on_it}}
            place |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
        border = {"color": BORDER, "width": [0.5 if value else 0 for value in values]}
        place |= {"base": [start / factor for start in starts], "marker": fill.marker(border)}
        told = [f"{name}: {fill.label} {text}" for name, text in zip(names, texts, strict=True)]
        bars.append(bars_along(fill, [value / factor for value in values], told, **place))
    totals = [parts.get("step", end) for parts, end in zip(sides.values(), ends, strict=True)]
    titles = [f"<b>{n}</b><br>{duration(s)}" for n, s in zip(names, totals, strict=True)]
    y = {"tickvals": rows, "ticktext": titles, "range": [len(rows) - 0.45, -0.4]}
    x = {"title": f"time per step, {unit}", "rangemode": "tozero"}
    panel = Panel(bars, x, y | {"showgrid": False})
    fits = {"minsize": 11, "mode": "hide"}
    # The table below the figure explains the colours; a legend would not wrap.
    layout: Described = {"barmode": "overlay", "uniformtext": fits, "showlegend": False}
    return figure_of([panel], 100 + 70 * len(rows), margin={"l": 100, "t": 24}, **layout)
