"""A paper's cells in a terminal, as JSON, and in its README."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from paceline.papers.cells import Basis, Cell, Paper, Table, mean_error

_COLUMNS = ("", "printed", "ours", "error", "kind")


def as_object(paper: Paper) -> dict[str, Any]:
    """Return the paper as `--json` prints it."""
    tables = [
        {
            "title": table.title,
            "cells": [
                {
                    "cell": cell.name,
                    "printed": cell.printed,
                    "ours": cell.ours,
                    "kind": cell.basis.value,
                }
                for cell in table.cells
            ],
        }
        for table in paper.tables
    ]
    return {"name": paper.name, "tables": tables}


def show(console: Console, papers: Sequence[Paper]) -> None:
    """Print all tables, and under each paper, and under all, how far the predictions are off."""
    for paper in papers:
        for table in paper.tables:
            console.print(_grid(f"{paper.name}: {table.title}", table))
        console.print(_summary(paper), soft_wrap=True)
    if len(papers) > 1:
        cells = [cell for paper in papers for cell in paper.cells]
        console.print(f"all papers: {_errors(cells)}", soft_wrap=True)


def _grid(title: str, table: Table) -> Grid:
    grid = Grid(title=title, title_justify="left")
    grid.add_column(_COLUMNS[0], overflow="fold")
    for column in _COLUMNS[1:]:
        grid.add_column(column, justify="right")
    for cell in table.cells:
        grid.add_row(*_row(cell))
    return grid


def markdown(paper: Paper) -> str:
    """Return all tables, and how far the predictions are off, for a README."""
    return "\n\n".join([*("\n".join(_lines(table)) for table in paper.tables), _summary(paper)])


def _lines(table: Table) -> Iterator[str]:
    yield f"**{table.title}**\n"
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---|" + "---:|" * (len(_COLUMNS) - 1)
    for cell in table.cells:
        yield f"| {' | '.join(_row(cell))} |"


def _row(cell: Cell) -> tuple[str, ...]:
    if cell.error is None:
        error = "" if cell.agrees is None else "agrees" if cell.agrees else "differs"
    else:
        error = "0 %" if cell.basis is Basis.EXACT and not cell.error else f"{cell.error:+.1%}"
    return cell.name, _shown(cell.printed), _shown(cell.ours), error, cell.basis.value


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.10g}" if float(value).is_integer() else f"{value:.4g}"


def _summary(paper: Paper) -> str:
    constants = f"{len(paper.calibrated)} calibrated constants"
    return f"{paper.name}: {constants}; {_errors(list(paper.cells))}"


def _errors(cells: Sequence[Cell]) -> str:
    predicted = [cell for cell in cells if cell.basis is Basis.PREDICTED]
    choices = [cell.agrees for cell in predicted if cell.agrees is not None]
    exact = [cell for cell in cells if cell.basis is Basis.EXACT]
    parts = []
    error = mean_error(cells)
    if error is not None:
        count = len(predicted) - len(choices)
        parts.append(f"mean absolute error of {count} predicted cells {error:.1%}")
    if choices:
        parts.append(f"{sum(choices)} of {len(choices)} predicted choices agree")
    if exact:
        agreeing = sum(cell.printed == cell.ours for cell in exact)
        parts.append(f"{agreeing} of {len(exact)} exact cells agree")
    return "; ".join(parts) or "nothing is predicted"
