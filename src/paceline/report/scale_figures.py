"""The figures of a scaling study: figures 3, 4 and 5 of Mojumder et al. 2018, for this one."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from paceline.core.timeline import Origin
from paceline.report.figures import styled, unit_of
from paceline.report.format import duration
from paceline.report.palette import PARTS, Fill
from paceline.scale_result import Cell

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_PATTERNS: dict[Origin, str] = {"measured": "", "rehearsed": "/", "predicted": "."}
_ROW, _REST, _LEFT = 190, 110, 60  # pixels
_OTHER = Fill("loading and other", "#f0e442")
_STACK = ("forward", "backward", "exposed", "update", "idle")


def epoch_times(cells: Sequence[Cell]) -> go.Figure:
    """Return an epoch's time by workers, a row for each batch and a bar for each method and kind.

    Whiskers are the quartiles of the repetitions.
    """
    figure, factor = _by_batch(cells)
    for row, batch in enumerate(_each(cells, lambda one: one.batch), 1):
        for method, kind, found in _sorts(one for one in cells if one.batch == batch):
            bars = _bars(found, method, kind, cells, factor, lambda one: one.epoch_s or 0.0)
            figure.add_trace(bars.update(showlegend=row == 1), row=row, col=1)
    return _finished(figure, cells)


def weak_times(cells: Sequence[Cell]) -> go.Figure:
    """Return the same of weak scaling, and in each bar the mean time of one worker's samples."""
    figure, factor = _by_batch(cells)
    for row, batch in enumerate(_each(cells, lambda one: one.batch), 1):
        for method, kind, found in _sorts(one for one in cells if one.batch == batch):
            whole = _bars(found, method, kind, cells, factor, lambda one: one.epoch_s or 0.0)
            part = _bars(found, method, kind, cells, factor, _for_each_worker)
            part.update(error_y=None, name=f"{part.name}, for each worker's samples")
            part.marker.pattern = {"shape": "x", "size": 6, "solidity": 0.3}
            whole.update(opacity=0.45)
            for bars in (whole, part):
                figure.add_trace(bars.update(showlegend=row == 1), row=row, col=1)
    return _finished(figure, cells)


def _for_each_worker(cell: Cell) -> float:
    return (cell.epoch_s or 0.0) / cell.workers


def breakdowns(cells: Sequence[Cell]) -> go.Figure:
    """Return where an epoch goes, a row for each method and a bar for each batch and workers."""
    methods = _each(cells, lambda one: one.method)
    unit, factor = unit_of(max(one.epoch_s or 0.0 for one in cells))
    figure = _rows([f"<b>{escape(method, quote=False)}</b>" for method in methods])
    for row, method in enumerate(methods, 1):
        found = [one for one in cells if one.method == method]
        for name in (*_STACK, "other"):
            fill = _OTHER if name == "other" else PARTS[name]
            bars = _stacked(found, fill, [_part(one, name) for one in found], factor)
            figure.add_trace(bars.update(showlegend=row == 1), row=row, col=1)
    figure.update_yaxes(title_text=f"epoch, {unit}", rangemode="tozero")
    figure.update_xaxes(type="category", title_text="workers x batch", row=len(methods), col=1)
    figure.update_layout(barmode="stack")
    return styled(figure, _REST + _ROW * len(methods), _LEFT)


def _part(cell: Cell, name: str) -> float:
    known = [getattr(cell, f"{part}_s") or 0.0 for part in _STACK]
    if name == "other":
        return max(0.0, (cell.epoch_s or 0.0) - sum(known))
    return known[_STACK.index(name)]


def _stacked(cells: Sequence[Cell], fill: Fill, seconds: Sequence[float], factor: float) -> go.Bar:
    return go.Bar(
        name=fill.label,
        legendgroup=fill.label,
        x=[f"{one.workers} x {one.batch}" for one in cells],
        y=[value / factor for value in seconds],
        customdata=[
            f"{_told(one)}: {fill.label} {duration(value)}"
            for one, value in zip(cells, seconds, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        marker=fill.marker({"width": 0}),
    )


def _by_batch(cells: Sequence[Cell]) -> tuple[go.Figure, float]:
    """Return a figure with a row for each batch, and the seconds of its unit."""
    batches = _each(cells, lambda one: one.batch)
    unit, factor = unit_of(max(one.epoch_s or 0.0 for one in cells))
    figure = _rows([f"<b>batch {batch}</b>" for batch in batches])
    figure.update_yaxes(title_text=f"epoch, {unit}", rangemode="tozero")
    names = [str(one) for one in sorted(_each(cells, lambda one: one.workers))]
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=names)
    figure.update_xaxes(title_text="workers", row=len(batches), col=1)
    return figure, factor


def _rows(titles: Sequence[str]) -> go.Figure:
    gap = 0.32 / len(titles) if len(titles) > 1 else 0
    return go.Figure().set_subplots(
        rows=len(titles), cols=1, subplot_titles=titles, vertical_spacing=gap
    )


def _finished(figure: go.Figure, cells: Sequence[Cell]) -> go.Figure:
    rows = len(_each(cells, lambda one: one.batch))
    figure.update_layout(barmode="group", bargap=0.25)
    return styled(figure, _REST + _ROW * rows, _LEFT)


def _sorts(cells: Iterable[Cell]) -> list[tuple[str, Origin, list[Cell]]]:
    """Return the cells of each method and kind, those with fewer workers first."""
    found: dict[tuple[str, Origin], list[Cell]] = {}
    for cell in cells:
        found.setdefault((cell.method, cell.kind), []).append(cell)
    return [
        (method, kind, sorted(group, key=lambda one: one.workers))
        for (method, kind), group in found.items()
    ]


def _bars(
    cells: Sequence[Cell],
    method: str,
    kind: Origin,
    all_cells: Sequence[Cell],
    factor: float,
    seconds_of: Callable[[Cell], float],
) -> go.Bar:
    methods = _each(all_cells, lambda one: one.method)
    kinds = _each(all_cells, lambda one: one.kind)
    name = method if len(kinds) == 1 else f"{method}, {kind}"
    colour = _COLOURS[methods.index(method) % len(_COLOURS)]
    seconds = [seconds_of(one) for one in cells]
    return go.Bar(
        name=name,
        legendgroup=name,
        offsetgroup=name,
        x=[str(one.workers) for one in cells],
        y=[value / factor for value in seconds],
        error_y=_whiskers(cells, factor),
        customdata=[
            f"{_told(one)}: {duration(value)}" for one, value in zip(cells, seconds, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        marker={
            "color": colour,
            "line": {"width": 0},
            "pattern": {
                "shape": _PATTERNS[kind] if len(kinds) > 1 else "",
                "size": 6,
                "solidity": 0.35,
            },
        },
    )


def _whiskers(cells: Sequence[Cell], factor: float) -> dict[str, Any] | None:
    """Return the quartiles as error bars; None where no cell has been repeated."""
    spans = [(one.epoch_s or 0.0, *(one.spread or (one.epoch_s, one.epoch_s))) for one in cells]
    if all(lower == upper for _, lower, upper in spans):
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [((upper or 0.0) - middle) / factor for middle, _, upper in spans],
        "arrayminus": [(middle - (lower or 0.0)) / factor for middle, lower, _ in spans],
        "color": "#888888",
        "thickness": 1.2,
        "width": 3,
    }


def _told(cell: Cell) -> str:
    workers = f"{cell.workers} worker{'s' * (cell.workers > 1)}"
    return f"{cell.method} on {workers}, batch {cell.batch}, {cell.kind}"


def _each(cells: Iterable[Cell], key: Callable[[Cell], Any]) -> list[Any]:
    return list(dict.fromkeys(map(key, cells)))
