"""Show a scaling study in a terminal or as a page with figures as in Mojumder et al. 2018.

Their figures 3 to 5 show epoch times and their parts by number of GPUs, batch and method. A method
is a strategy. A cell of a study is an epoch with one method, number of workers and batch size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import fmean
from typing import Any, get_args

from rich.table import Table as TerminalTable

from paceline.core.timeline import Origin
from paceline.records.scale import ScaleCell, ScaleResult, Scaling, TimedCell, most_real, timed
from paceline.report import advice, figures
from paceline.report.figures import COLOURS, PARTS, Described, Fill, Panel, figure_of
from paceline.report.format import Quantity, change_text, counted, duration, nbytes, number, share
from paceline.report.metrics import comparable
from paceline.report.page import Page, facts
from paceline.report.tables import Rows, Table
from paceline.report.terminal import shown as in_terminal

_PATTERNS = {Origin.MEASURED: "", Origin.REHEARSED: "/", Origin.PREDICTED: "."}
_ROW, _REST = 190, 110  # pixels: height of each panel, and of the rest of a figure
_STACK = ("forward", "backward", "exposed", "update", "idle")
_FILLS = {name: PARTS[name] for name in _STACK} | {"other": Fill("loading and other", "#f0e442")}

_RANGES = "predicted ranges should contain 9 of 10 measured epochs"
_QUARTILES = "other ranges are quartiles of repetitions"
_OF_BATCH: dict[Scaling, str] = {"strong": "", "strong-per-worker": "/w.", "weak": " each"}


def page_of(result: ScaleResult) -> Page:
    """Build the HTML page of a scaling study."""
    good, shown = timed(result.cells), comparable(result.cells)
    beside, errors = _beside(good)
    alone = [cell for cell in good if cell.workers == 1 and cell.scaling == good[0].scaling]
    failed = [f"{', '.join(_asked(cell))}: {cell.error}" for cell in result.cells if cell.error]
    content: dict[str, Any] = {
        "result": result,
        "line": _line(result),
        "tiles": list(_tiles(result)),
        "epochs": {
            scaling: _epoch_times(found)
            for scaling in get_args(Scaling)
            if (found := [cell for cell in good if cell.scaling == scaling])
        },
        "speedups": _by_workers(good, _speedup) if len(_distinct(good, "workers")) > 1 else None,
        "overhead": _overhead(alone) if len(_distinct(alone, "method")) > 1 else None,
        "synchronisation": _by_workers(good, _waits) if good else None,
        "breakdowns": _breakdowns(shown) if shown else None,
        "real": shown[0] if shown else None,
        "beside": beside if errors else None,
        "mean_error": fmean(map(abs, errors)) if errors else 0.0,
        "cells": _cells(result.cells),
        "failed": failed,
        "settings": facts(result.settings, result.machine),
    }
    return Page(f"{result.settings.model}, scaling study {result.id}", "scale.html", content)


def _line(result: ScaleResult) -> str:
    settings = result.settings
    workers, batches = (
        ", ".join(map(str, each)) for each in (settings.workers, settings.batch_size)
    )
    return (
        f"{' and '.join(settings.kinds)}: {', '.join(settings.strategy)} on {workers} workers, "
        f"batches of {batches}, {' and '.join(settings.scaling)} scaling"
    )


def _tiles(result: ScaleResult) -> Iterator[tuple[str, str, str]]:
    good = timed(result.cells)
    yield "cells", f"{len(good)} of {len(result.cells)}", "succeeded"
    strong = [cell for cell in most_real(good) if cell.scaling != "weak"]
    if not strong:
        return
    best = min(strong, key=attrgetter("epoch_s"))
    where = f"{best.method}, {counted(best.workers, 'worker')}, batch {best.batch}"
    yield "fastest epoch", duration(best.epoch_s), f"{best.kind}: {where}"
    yield "exposed", share(best.exposed_s / best.epoch_s), "of that epoch"
    yield "memory", nbytes(best.memory_bytes), "of its fullest worker"


def _speedup(one: TimedCell, fewest: TimedCell) -> str:
    return number(one.rate / fewest.rate)


def _waits(one: TimedCell, fewest: TimedCell) -> str:
    return share((one.exposed_s + one.idle_s) / one.epoch_s)


def _by_workers(cells: Sequence[TimedCell], shown: Callable[[TimedCell, TimedCell], str]) -> Table:
    """Return a table of a study's cells with a column for each number of workers.

    `shown(cell, fewest)` formats a cell; `fewest` is the cell with the fewest workers in its row.
    """
    counts = sorted(_distinct(cells, "workers"))
    by_sort: dict[tuple[str, int, Scaling, Origin], dict[int, TimedCell]] = {}
    for cell in cells:
        sort = (cell.method, cell.batch, cell.scaling, cell.kind)
        by_sort.setdefault(sort, {})[cell.workers] = cell
    rows: Rows = []
    for (method, batch, scaling, kind), found in by_sort.items():
        fewest = found[min(found)]
        columns = [shown(found[n], fewest) if n in found else "-" for n in counts]
        rows.append((method, str(batch), scaling, kind, *columns))
    head = ("method", "batch", "scaling", "kind", *(f"{count} w." for count in counts))
    return Table(head, rows, (0, 2, 3))


def _overhead(alone: Sequence[TimedCell]) -> Table:
    """Compare strategies on one worker: how much longer an epoch takes than with the fastest.

    Like table II of Mojumder et al. 2018. `alone`: the cells (epochs) with one worker.
    """
    methods = _distinct(alone, "method")
    by_batch: dict[tuple[Origin, int], dict[str, TimedCell]] = {}
    for cell in alone:
        by_batch.setdefault((cell.kind, cell.batch), {})[cell.method] = cell
    rows: Rows = []
    for (kind, batch), found in by_batch.items():
        least = min(found.values(), key=attrgetter("epoch_s"))
        shown = [_longer(found[name], least) if name in found else "-" for name in methods]
        rows.append((kind, str(batch), duration(least.epoch_s), *shown))
    return Table(("kind", "batch", "least epoch", *methods), rows)


def _longer(one: TimedCell, least: TimedCell) -> Quantity:
    """Format how much longer the epoch of `one` takes than the shortest epoch, `least`.

    Adds "not significant" if the ranges of the two epoch times overlap.
    """
    change = one.epoch_s / least.epoch_s - 1
    unsure = one is not least and not one.differs_from(least)
    text = change_text(change) + (", not significant" if unsure else "")
    return Quantity(text, 100 * change, "%")


def _beside(cells: Sequence[TimedCell]) -> tuple[Table, list[float]]:
    """Return a table that compares predicted epoch times with others, and the relative errors.

    The other times are measured or rehearsed; errors are relative to them.
    """
    predicted = {cell.point: cell.epoch_s for cell in cells if cell.kind is Origin.PREDICTED}
    rows: Rows = []
    errors = []
    for cell in cells:
        if cell.kind is not Origin.PREDICTED and cell.point in predicted:
            predicted_s = predicted[cell.point]
            errors.append(predicted_s / cell.epoch_s - 1)
            times = duration(predicted_s), duration(cell.epoch_s)
            rows.append((*_asked(cell), *times, change_text(errors[-1])))
    head = ("method", "workers", "batch", "scaling", "kind", "predicted", "found", "error")
    return Table(head, rows, (0, 3, 4)), errors


def _asked(cell: ScaleCell) -> tuple[str, str, str, str, str]:
    return cell.method, str(cell.workers), str(cell.batch), cell.scaling, cell.kind


def _cells(cells: Sequence[ScaleCell]) -> Table:
    asked = ("method", "workers", "batch", "scaling", "kind")
    of_epoch = ("epoch", "lower", "upper", "forward", "backward", "exposed", "memory")
    rows: Rows = []
    for cell in cells:
        found = ("failed", *["-"] * 6)
        if cell.error is None and cell.epoch_s is not None and cell.spread is not None:
            parts = [value or 0.0 for value in (cell.forward_s, cell.backward_s, cell.exposed_s)]
            seconds = map(duration, (cell.epoch_s, *cell.spread, *parts))
            found = (*seconds, nbytes(cell.memory_bytes or 0))
        rows.append((*_asked(cell), *found))
    return Table((*asked, *of_epoch), rows, (0, 3, 4))


def _epoch_times(cells: Sequence[TimedCell]) -> Described:
    """Draw epoch times by number of workers: a panel for each batch size.

    Each strategy and kind (such as measured) has a bar at each number of workers. With weak
    scaling, a second bar shows the epoch time divided by the number of workers.
    """
    batches = _distinct(cells, "batch")
    unit, factor = figures.unit_of(max(cell.epoch_s for cell in cells))
    names = [str(one) for one in sorted(_distinct(cells, "workers"))]
    x = {"type": "category", "categoryorder": "array", "categoryarray": names}
    panels = []
    for batch in batches:
        groups: dict[tuple[str, Origin], list[TimedCell]] = {}
        for cell in cells:
            if cell.batch == batch:
                groups.setdefault((cell.method, cell.kind), []).append(cell)
        bars = [bar for group in groups.values() for bar in _bars(group, cells, factor)]
        title = f"<b>batch {batch}</b>"
        panels.append(([one | {"showlegend": batch == batches[0]} for one in bars], title))
    return _rows(panels, x, "workers", unit, barmode="group", bargap=0.25)


def _bars(
    cells: Sequence[TimedCell], all_cells: Sequence[TimedCell], factor: float
) -> Iterator[Described]:
    """Yield plotly bars for `cells`, which have one strategy and kind, in the strategy's colour.

    `all_cells`: determine the colours. `factor`: the y axis's unit in seconds.
    """
    method, kind = cells[0].method, cells[0].kind
    methods, kinds = _distinct(all_cells, "method"), _distinct(all_cells, "kind")
    name = method if len(kinds) == 1 else f"{method}, {kind}"
    pattern = {"shape": _PATTERNS[kind] if len(kinds) > 1 else "", "size": 6, "solidity": 0.35}
    colour = COLOURS[methods.index(method) % len(COLOURS)]
    marker: Described = {"color": colour, "line": {"width": 0}, "pattern": pattern}
    shared: Described = {"x": [str(one.workers) for one in cells], "offsetgroup": name}
    shared |= {"legendgroup": name}
    epochs = [one.epoch_s for one in cells]
    whole = _bar(cells, epochs, factor, name=name, marker=marker, **shared)
    if any(one.range_s[0] != one.range_s[1] for one in cells):
        whole["error_y"] = _whiskers(cells, factor)
    if cells[0].scaling != "weak":
        yield whole
        return
    yield whole | {"opacity": 0.45}
    each = [one.epoch_s / one.workers for one in cells]
    crossed = marker | {"pattern": {"shape": "x", "size": 6, "solidity": 0.3}}
    name = f"{name}, for each worker's samples"
    yield _bar(cells, each, factor, name=name, marker=crossed, **shared)


def _bar(
    cells: Sequence[TimedCell],
    seconds: Sequence[float],
    factor: float,
    part: str = "",
    **settings: Any,
) -> Described:
    """Build a plotly trace with a bar for each cell.

    `seconds`: heights of the bars. `factor`: the y axis's unit in seconds. `part`: text before
    the time in a hover text.
    """
    told = [
        f"{one.method} on {counted(one.workers, 'worker')}, batch {one.batch}, {one.kind}: "
        f"{part}{duration(value)}"
        for one, value in zip(cells, seconds, strict=True)
    ]
    bar = {"type": "bar", "y": [value / factor for value in seconds], "customdata": told}
    return bar | {"hovertemplate": figures.HOVER} | settings


def _whiskers(cells: Sequence[TimedCell], factor: float) -> Described:
    spans = [(one.epoch_s, *one.range_s) for one in cells]
    above = [(upper - middle) / factor for middle, _, upper in spans]
    below = [(middle - lower) / factor for middle, lower, _ in spans]
    ends = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return ends | {"color": "#888888", "thickness": 1.2, "width": 3}


def _breakdowns(cells: Sequence[TimedCell]) -> Described:
    """Draw the parts of epochs, such as forward, as stacked bars: a panel for each strategy.

    A panel has a bar for each combination of a number of workers and a batch size.
    """
    methods = _distinct(cells, "method")
    unit, factor = figures.unit_of(max(cell.epoch_s for cell in cells))
    panels = []
    for method in methods:
        found = [one for one in cells if one.method == method]
        known = [{name: getattr(one, f"{name}_s") or 0.0 for name in _STACK} for one in found]
        for one, parts in zip(found, known, strict=True):
            parts["other"] = max(0.0, one.epoch_s - sum(parts.values()))
        shared: Described = {"x": [f"{one.workers} x {one.batch}" for one in found]}
        shared |= {"showlegend": method == methods[0]}
        bars = []
        for name, fill in _FILLS.items():
            own: Described = {"name": fill.label, "legendgroup": fill.label} | shared
            own["marker"] = fill.marker({"width": 0})
            seconds = [parts[name] for parts in known]
            bars.append(_bar(found, seconds, factor, f"{fill.label} ", **own))
        panels.append((bars, f"<b>{figures.escaped(method)}</b>"))
    return _rows(panels, {"type": "category"}, "workers x batch", unit, barmode="stack")


def _rows(
    panels: Sequence[tuple[Sequence[Described], str]],
    x: Described,
    below: str,
    unit: str,
    **layout: Any,
) -> Described:
    """Build a figure of panels of epoch times, one below the other.

    `panels`: bars and title of each panel. `below`: title of the lowest x axis. `unit`: unit of the
    y axes.
    """
    y = {"title": f"epoch, {unit}", "rangemode": "tozero"}
    last = len(panels) - 1
    drawn = [
        Panel(bars, x | ({"title": below} if number == last else {}), y, title)
        for number, (bars, title) in enumerate(panels)
    ]
    heights, gap = [1] * len(panels), 0.32 / len(panels)
    return figure_of(drawn, _REST + _ROW * len(panels), heights=heights, gap=gap, **layout)


def _distinct(cells: Iterable[TimedCell], field: str) -> list[Any]:
    return list(dict.fromkeys(map(attrgetter(field), cells)))


def cells_table(cells: Sequence[ScaleCell]) -> TerminalTable:
    """Return a terminal table of a study's cells that fits into 80 columns."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    spread = "range" if Origin.PREDICTED in kinds else "quartiles"
    head = ("method", "workers", "batch", "kind", "epoch", spread, "compute", "exposed", "memory")
    rows = list(map(_row_of, cells))
    needless = ["kind"] if len(kinds) == 1 else []
    needless += [] if any(row[head.index(spread)] for row in rows) else [spread]
    title = f"Seconds of an epoch, {' and '.join(kinds)}; memory in MiB"
    drawn = in_terminal(title, Table(head, rows, (0, 3)).without(*needless), gap=1)
    for column in drawn.columns:
        # In a narrow terminal, wrap only the column "kind", because the others have numbers.
        column.no_wrap = column.header != "kind"
    return drawn


def _row_of(cell: ScaleCell) -> tuple[str, ...]:
    computed = ends = None
    if cell.forward_s is not None and cell.backward_s is not None:
        computed = cell.forward_s + cell.backward_s
    if cell.spread is not None and cell.spread[0] != cell.spread[1]:
        ends = "-".join(map(_seconds, cell.spread))
    return (
        cell.method,
        str(cell.workers),
        str(cell.batch) + _OF_BATCH[cell.scaling],
        cell.kind,
        "failed" if cell.error is not None else _seconds(cell.epoch_s),
        ends or "",
        _seconds(computed),
        _seconds(cell.exposed_s),
        "" if cell.memory_bytes is None else f"{cell.memory_bytes / 2**20:,.0f}",
    )


def _seconds(value: float | None) -> str:
    """Format seconds with three significant digits, or without decimals from 100 s upwards."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def sentences(result: ScaleResult) -> list[str]:
    """Return the lines below `cells_table`: errors, the meaning of the ranges, and advice."""
    failed: dict[str, list[ScaleCell]] = {}
    for cell in result.cells:
        if cell.error is not None:
            failed.setdefault(cell.error, []).append(cell)
    lines = []
    for reason, (first, *others) in failed.items():
        more = f" (and {len(others)} more)" if others else ""
        lines.append(f"failed: {' '.join(_asked(first))}: {reason}{more}")
    kinds = {cell.kind for cell in result.cells if cell.spread is not None}
    if Origin.PREDICTED in kinds:
        lines.append(_RANGES if len(kinds) == 1 else f"{_RANGES}; {_QUARTILES}")
    return [*lines, *advice.shown(result.findings)]
