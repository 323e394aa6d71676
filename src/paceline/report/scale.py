"""The sections of a scaling study."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from paceline.core.timeline import Origin
from paceline.report.format import duration, nbytes, number, share
from paceline.report.header import Drawn, Tile, header
from paceline.report.insights import insights
from paceline.report.markup import Html, element, fact_table, table
from paceline.report.scale_figures import breakdowns, epoch_times, weak_times
from paceline.report.sections import figure_of, readable, section
from paceline.scale_result import Cell, ScaleResult, read_scale
from paceline.scale_settings import Point

_REAL: tuple[Origin, ...] = ("measured", "rehearsed", "predicted")
_EPOCH = (
    "An epoch is its steps times the median step of the repetitions; only some steps are really "
    "taken. Whiskers are quartiles."
)


def drawn(folder: Path) -> Drawn | None:
    """Return the page of the folder of a study; None if it is one of another kind."""
    result = read_scale(folder)
    if result is None:
        return None
    return f"{result.settings.model}, scaling study {result.id}", _sections(result)


def _sections(result: ScaleResult) -> Iterator[Html]:
    yield _header(result)
    yield insights(result.insights)
    good = [cell for cell in result.cells if cell.error is None]
    strong = [cell for cell in good if cell.scaling == "strong"]
    weak = [cell for cell in good if cell.scaling == "weak"]
    if strong:
        note = f"Workers share a batch, and an epoch keeps its samples. {_EPOCH}"
        yield section("Strong scaling", note, figure_of(epoch_times(strong), "strong"))
    if weak:
        note = f"Each worker has a batch of its own, and samples grow with the workers. {_EPOCH}"
        yield section("Weak scaling", note, figure_of(weak_times(weak), "weak"))
    if len({cell.workers for cell in good}) > 1:
        yield _speedups(good)
    yield from _overhead(good)
    if good:
        yield _where_it_goes(good)
    yield from _side_by_side(good)
    yield _cells(result.cells)
    yield from _failures(result.cells)
    yield _facts(result)


def _header(result: ScaleResult) -> Html:
    settings = result.settings
    workers, batches = (", ".join(map(str, each)) for each in (settings.workers, settings.batch))
    line = (
        f"{' and '.join(settings.kinds)}: {', '.join(settings.exchange)} on {workers} workers, "
        f"batches of {batches}, {' and '.join(settings.scaling)} scaling"
    )
    return header(settings.model, line, result.id, _tiles(result))


def _tiles(result: ScaleResult) -> Iterator[Tile]:
    done = sum(cell.error is None for cell in result.cells)
    yield "cells", f"{done} of {len(result.cells)}", "have gone well"
    timed = [cell for cell in _most_real(result.cells) if cell.scaling == "strong"]
    if not timed:
        return
    best = min(timed, key=lambda cell: cell.epoch_s or 0.0)
    workers = f"{best.workers} worker{'s' * (best.workers > 1)}"
    where = f"{best.method}, {workers}, batch {best.batch}"
    yield "fastest epoch", duration(best.epoch_s or 0.0), f"{best.kind}: {where}"
    yield "exposed", share((best.exposed_s or 0.0) / (best.epoch_s or 1.0)), "of that epoch"
    yield "memory", nbytes(best.memory_bytes or 0), "of its fullest worker"


def _most_real(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells that have gone well of the kind that is the most real."""
    good = [cell for cell in cells if cell.error is None]
    kinds = {cell.kind for cell in good}
    first = next((kind for kind in _REAL if kind in kinds), None)
    return [cell for cell in good if cell.kind == first]


def _speedups(cells: Sequence[Cell]) -> Html:
    """Return how many times as many samples pass in a second as on the fewest workers."""
    counts = sorted({cell.workers for cell in cells})
    found = {(cell.kind, cell.point): cell for cell in cells}
    sorts = dict.fromkeys((one.kind, one.scaling, one.method, one.batch) for one in cells)
    rows = []
    for kind, scaling, method, batch in sorts:
        rates = {
            workers: _rate(cell)
            for workers in counts
            if (cell := found.get((kind, Point(method, workers, batch, scaling)))) is not None
        }
        base = next(iter(rates.values()))
        columns = [number(rates[count] / base) if count in rates else "-" for count in counts]
        rows.append((method, str(batch), scaling, kind, *columns))
    head = ("method", "batch", "scaling", "kind", *(f"{count} w." for count in counts))
    note = "Times the samples a second of the fewest workers of the row."
    return section("Speed-up", note, table(head, rows, text_columns=(0, 2, 3)))


def _rate(cell: Cell) -> float:
    return (cell.workers if cell.scaling == "weak" else 1) / (cell.epoch_s or 1.0)


def _overhead(cells: Sequence[Cell]) -> Iterator[Html]:
    """Yield what each method costs one worker, which has nobody to exchange with."""
    alone = [cell for cell in cells if cell.workers == 1 and cell.scaling == cells[0].scaling]
    methods = list(dict.fromkeys(cell.method for cell in alone))
    if len(methods) < 2:
        return
    rows = []
    for kind, batch in dict.fromkeys((cell.kind, cell.batch) for cell in alone):
        seconds = {
            cell.method: cell.epoch_s or 0.0
            for cell in alone
            if (cell.kind, cell.batch) == (kind, batch)
        }
        least = min(seconds.values())
        shown = [
            share(seconds[name] / least - 1, signed=True) if name in seconds else "-"
            for name in methods
        ]
        rows.append((kind, str(batch), duration(least), *shown))
    head = ("kind", "batch", "least epoch", *methods)
    note = "By how much an epoch is longer than with the method that costs least."
    drawn = table(head, rows, text_columns=(0,))
    yield section("A method's overhead on one worker", note, drawn)


def _where_it_goes(cells: Sequence[Cell]) -> Html:
    kind = _most_real(cells)
    shown = [cell for cell in kind if cell.scaling == kind[0].scaling]
    note = (
        f"Of {shown[0].kind} epochs, {shown[0].scaling} scaling. Parts of traced steps, as shares "
        "of the median step. Hidden communication runs beside the computation, and is not there."
    )
    return section("Where an epoch goes", note, figure_of(breakdowns(shown), "breakdowns"))


def _side_by_side(cells: Sequence[Cell]) -> Iterator[Html]:
    """Yield the predicted cells beside others of the same point, and how far they are off."""
    found = {(cell.kind, cell.point): cell.epoch_s or 0.0 for cell in cells}
    pairs = [
        (cell, predicted)
        for cell in cells
        if cell.kind != "predicted"
        and (predicted := found.get(("predicted", cell.point))) is not None
    ]
    if not pairs:
        return
    errors = [predicted / (cell.epoch_s or 1.0) - 1 for cell, predicted in pairs]
    rows = [
        (
            *_point(cell),
            duration(predicted),
            duration(cell.epoch_s or 0.0),
            share(error, signed=True),
        )
        for (cell, predicted), error in zip(pairs, errors, strict=True)
    ]
    head = ("method", "workers", "batch", "scaling", "beside", "predicted", "found", "error")
    note = f"Predictions are off by {share(fmean(map(abs, errors)))} on average."
    yield section("Predicted beside found", note, table(head, rows, text_columns=(0, 3, 4)))


def _point(cell: Cell) -> tuple[str, str, str, str, str]:
    return cell.method, str(cell.workers), str(cell.batch), cell.scaling, cell.kind


def _cells(cells: Sequence[Cell]) -> Html:
    """Return all cells; seconds are of an epoch."""
    asked = ("method", "workers", "batch", "scaling", "kind")
    timed = ("epoch", "lower quartile", "upper", "forward", "backward", "exposed", "memory")
    rows = [(*_point(cell), *_found(cell)) for cell in cells]
    drawn = element("div", table((*asked, *timed), rows, text_columns=(0, 3, 4)), class_="wide")
    return section("All cells", "Times are of an epoch.", drawn)


def _found(cell: Cell) -> tuple[str, ...]:
    if cell.error is not None or cell.epoch_s is None or cell.spread is None:
        return ("failed", *["-"] * 6)
    parts = [duration(value or 0.0) for value in (cell.forward_s, cell.backward_s, cell.exposed_s)]
    return (
        duration(cell.epoch_s),
        *map(duration, cell.spread),
        *parts,
        nbytes(cell.memory_bytes or 0),
    )


def _failures(cells: Sequence[Cell]) -> Iterator[Html]:
    failed = [f"{', '.join(_point(cell))}: {cell.error}" for cell in cells if cell.error]
    if failed:
        listed = element("ul", *(element("li", one) for one in failed), class_="faults")
        yield section("Failed cells", "method, workers, batch, scaling, kind", listed)


def _facts(result: ScaleResult) -> Html:
    settings = result.settings.model_dump(mode="json")
    columns = (
        element("div", element("h3", "Settings"), fact_table(readable(settings))),
        element("div", element("h3", "Machine and versions"), fact_table(readable(result.machine))),
    )
    return section("Settings and machine", "", element("div", *columns, class_="pair"))
