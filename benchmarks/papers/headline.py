"""Sum up how well the plans predict the papers: predicted cells alone, beside naive predictors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from rich.console import Console

from paceline.report.terminal import table as terminal_table
from papers.paper_tables import Basis, Paper, PaperCell

COLUMNS = ("", "printed", "ours", "error", "kind")
_HEADLINES = ("predicted", "error", "mean of the table", "alpha-beta", "overhead", "choices")


@dataclass(frozen=True, slots=True)
class Versus:
    """The mean absolute errors of a naive predictor and of ours over the same cells."""

    num_cells: int
    error: float
    ours: float


@dataclass(frozen=True, slots=True)
class Headline:
    """The errors over predicted cells, as shares; None where there is no such cell.

    `overhead` is the mean of the signed errors of what several workers lose, over `num_overheads`
    cells that are a time or a speed-up of them.
    """

    num_predicted: int
    error: float | None
    mean: Versus | None
    alpha_beta: Versus | None
    num_overheads: int
    overhead: float | None
    num_choices: int
    num_agreeing_choices: int


def headline(cells: Iterable[PaperCell]) -> Headline:
    """Return the errors of the predicted cells among these."""
    predicted = [cell for cell in cells if cell.basis is Basis.PREDICTED]
    errors = _absolute(cell.error for cell in predicted)
    choices = [cell.agrees for cell in predicted if cell.agrees is not None]
    lost = [cell.overhead_error for cell in predicted]
    overheads = [error for error in lost if error is not None]
    return Headline(
        num_predicted=len(errors),
        error=mean(errors) if errors else None,
        mean=_versus(predicted, lambda cell: cell.naive.mean),
        alpha_beta=_versus(predicted, lambda cell: cell.naive.alpha_beta),
        num_overheads=len(overheads),
        overhead=mean(overheads) if overheads else None,
        num_choices=len(choices),
        num_agreeing_choices=sum(choices),
    )


def mean_error(cells: Iterable[PaperCell]) -> float | None:
    """Return the mean absolute relative error of the predicted numbers; None if there are none."""
    return headline(cells).error


def _versus(
    cells: Iterable[PaperCell], value_of: Callable[[PaperCell], float | None]
) -> Versus | None:
    both = [(cell, value) for cell in cells if (value := value_of(cell)) is not None]
    theirs = _absolute(cell.error_of(value) for cell, value in both)
    ours = _absolute(cell.error for cell, _ in both)
    return Versus(len(theirs), mean(theirs), mean(ours)) if theirs else None


def _absolute(errors: Iterable[float | None]) -> list[float]:
    return [abs(error) for error in errors if error is not None]


def as_object(papers: Sequence[Paper]) -> dict[str, Any]:
    """Return the papers as `--json` prints them."""
    return {
        "papers": [
            {
                "name": paper.name,
                "headline": asdict(headline(paper.cells)),
                "tables": [
                    {"title": table.title, "cells": [_cell_object(cell) for cell in table.cells]}
                    for table in paper.tables
                ],
            }
            for paper in papers
        ],
        "headline": asdict(headline(cell for paper in papers for cell in paper.cells)),
    }


def _cell_object(cell: PaperCell) -> dict[str, Any]:
    found: dict[str, Any] = {
        "cell": cell.name,
        "printed": cell.printed,
        "ours": cell.ours,
        "kind": cell.basis.value,
    }
    naive = {name: value for name, value in asdict(cell.naive).items() if value is not None}
    if naive:
        found["naive"] = naive
    if cell.overhead_error is not None:
        found["overhead_error"] = cell.overhead_error
    return found


def show(console: Console, papers: Sequence[Paper]) -> None:
    """Print all tables and what each paper's cells rest on, and then the headlines."""
    for paper in papers:
        for table in paper.tables:
            title, rows = f"{paper.name}: {table.title}", map(row_texts, table.cells)
            grid = terminal_table(title, COLUMNS[:1], COLUMNS[1:], rows)
            grid.columns[0].overflow = "fold"
            console.print(grid)
        console.print(summary(paper), soft_wrap=True)
    title = "Predicted cells alone: mean absolute errors, and the overhead's signed error"
    console.print(terminal_table(title, [""], _HEADLINES, headline_rows(papers)))
    console.print(HOW_TO_READ, soft_wrap=True)


HOW_TO_READ = (
    "mean of the table: every cell is the mean of its printed series, itself among them. "
    "alpha-beta: computation and, after it, the exchange of all gradients. Both with our error "
    "over the same cells, where they say anything. overhead: of what several workers lose."
)


def headline_rows(papers: Sequence[Paper]) -> list[tuple[str, ...]]:
    """Return the texts of the headlines of each paper, and of all if there are several."""
    rows = [(paper.name, *_headline_texts(headline(paper.cells))) for paper in papers]
    if len(papers) > 1:
        every = headline(cell for paper in papers for cell in paper.cells)
        rows.append(("all papers", *_headline_texts(every)))
    return rows


def _headline_texts(one: Headline) -> tuple[str, ...]:
    return (
        str(one.num_predicted),
        _share(one.error),
        _versus_text(one.mean),
        _versus_text(one.alpha_beta),
        "" if one.overhead is None else f"{one.overhead:+.0%} of {one.num_overheads}",
        f"{one.num_agreeing_choices} of {one.num_choices}" if one.num_choices else "",
    )


def _share(error: float | None) -> str:
    return "" if error is None else f"{error:.1%}"


def _versus_text(found: Versus | None) -> str:
    return "" if found is None else f"{found.error:.1%}; ours {found.ours:.1%} of {found.num_cells}"


def row_texts(cell: PaperCell) -> tuple[str, ...]:
    """Return the texts of a cell below `COLUMNS`."""
    parts = [] if cell.agrees is None else ["agrees" if cell.agrees else "differs"]
    if cell.error is not None and not cell.agrees:
        parts.append(f"{cell.error:+.1%}")
    return cell.name, _shown(cell.printed), _shown(cell.ours), " ".join(parts), cell.basis.value


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.10g}" if float(value).is_integer() else f"{value:.4g}"


def summary(paper: Paper) -> str:
    """Return in a line what the cells rest on, and the errors of the predicted ones."""
    one = headline(paper.cells)
    error = "" if one.error is None else f", {_share(one.error)} off"
    parts = [f"{paper.name}: {one.num_predicted} numbers predicted{error}"]
    for name, found in (("mean of the table", one.mean), ("alpha-beta", one.alpha_beta)):
        if found:
            over = f"ours {found.ours:.1%} over the same {found.num_cells}"
            parts.append(f"{name} {found.error:.1%} ({over})")
    if one.overhead is not None:
        parts.append(f"overhead {one.overhead:+.0%} in {one.num_overheads}")
    if one.num_choices:
        parts.append(f"{one.num_agreeing_choices} of {one.num_choices} predicted choices agree")
    return "; ".join([*parts, _not_counted(paper)])


def _not_counted(paper: Paper) -> str:
    exact = [cell.agrees for cell in paper.cells if cell.basis is Basis.EXACT]
    parts = [
        f"{paper.num(Basis.DERIVED)} derived",
        f"{paper.num(Basis.CALIBRATED)} calibrated ({len(paper.calibrated)} constants)",
    ]
    if exact:
        parts.append(f"{len(exact)} exact ({sum(map(bool, exact))} agree)")
    return f"not counted: {', '.join(parts)}"
