"""Hold a paper's tables cell by cell, and show them: the printed values beside ours.

What a paper prints stands in the TOML file of its name beside this module. Each of its cells has a
name, the printed value, the arguments `of` which ours is computed from, and its kind, a `Basis`.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from statistics import mean
from typing import Any

from rich.console import Console

from paceline.report.terminal import table as terminal_table

COLUMNS = ("", "printed", "ours", "error", "kind")


class Basis(StrEnum):
    """The origin of our value of a cell.

    `EXACT` follows from definitions alone, and has to agree to the last printed digit. A constant
    was taken from a `CALIBRATED` cell, so its agreement proves nothing. All others are `PREDICTED`.
    """

    PREDICTED = "predicted"
    CALIBRATED = "calibrated"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class PaperCell:
    """One printed value, a number or a choice such as the fastest method, and ours."""

    name: str
    printed: float | str
    ours: float | str
    basis: Basis = Basis.PREDICTED

    def __post_init__(self) -> None:
        if isinstance(self.printed, str) != isinstance(self.ours, str):
            raise ValueError(f"{self.name}: {self.printed!r} and {self.ours!r} cannot be compared")

    @property
    def error(self) -> float | None:
        """Return our value over the printed one, less 1; None for choices, and for a printed 0."""
        if isinstance(self.printed, str) or isinstance(self.ours, str) or not self.printed:
            return None
        return self.ours / self.printed - 1

    @property
    def agrees(self) -> bool | None:
        """True if a choice is the printed one; None for numbers."""
        return self.printed == self.ours if isinstance(self.printed, str) else None


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A table or a figure of a paper; its title names both, and the unit."""

    title: str
    cells: tuple[PaperCell, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper, its tables, and the name and the source of each calibrated constant.

    Raises ValueError if there are more of them than a third of the predicted cells.
    """

    name: str
    citation: str
    tables: tuple[PaperTable, ...]
    calibrated: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if 3 * len(self.calibrated) > self.num(Basis.PREDICTED):
            raise ValueError(
                f"{self.name}: {len(self.calibrated)} calibrated constants are too many for "
                f"{self.num(Basis.PREDICTED)} predicted cells"
            )

    @property
    def cells(self) -> Iterator[PaperCell]:
        """All cells of all tables."""
        return (cell for table in self.tables for cell in table.cells)

    def num(self, basis: Basis) -> int:
        """Return the number of cells of this origin."""
        return sum(cell.basis is basis for cell in self.cells)


# Our values of a table's cells: by the cell's name, or computed of the arguments in the file.
Ours = Mapping[str, float | str] | Callable[..., float | str]


@cache
def read_printed(name: str) -> dict[str, Any]:
    """Return what stands in the data file of a paper."""
    file = resources.files(__package__).joinpath(f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def printed_values(name: str, table: str) -> dict[tuple[Any, ...], Any]:
    """Return the printed values of a paper's table, each under the arguments that ours is of.

    A cell without arguments is under its own name.
    """
    (found,) = (one for one in read_printed(name)["tables"] if one["name"] == table)
    return {tuple(row.get("of", [row["cell"]])): row["printed"] for row in found["cells"]}


def paper_of(name: str, ours: Mapping[str, Ours], shares: Mapping[str, float] = {}) -> Paper:
    """Return a paper with our values, which `ours` has or computes for each table by its name.

    `shares` are shown in per cent beside the names of their cells.
    """
    data = read_printed(name)
    tables = []
    for table in data["tables"]:
        own, cells = ours[table["name"]], []
        for row in table["cells"]:
            label = row["cell"]
            value = own[label] if isinstance(own, Mapping) else own(*row["of"])
            if label in shares:
                label += f" ({100 * shares[label]:.0f} %)"
            kind = Basis(row.get("kind", Basis.PREDICTED))
            cells.append(PaperCell(label, row["printed"], value, kind))
        tables.append(PaperTable(table["title"], tuple(cells)))
    constants = tuple((constant, source) for constant, source in data["calibrated"])
    return Paper(name, data["citation"], tuple(tables), constants)


def mean_error(cells: Iterable[PaperCell]) -> float | None:
    """Return the mean absolute relative error of the predicted numbers; None if there are none."""
    errors = [
        abs(cell.error)
        for cell in cells
        if cell.basis is Basis.PREDICTED and cell.error is not None
    ]
    return mean(errors) if errors else None


def as_object(paper: Paper) -> dict[str, Any]:
    """Return the paper as `--json` prints it."""
    tables = []
    for table in paper.tables:
        cells = [
            {"cell": one.name, "printed": one.printed, "ours": one.ours, "kind": one.basis.value}
            for one in table.cells
        ]
        tables.append({"title": table.title, "cells": cells})
    return {"name": paper.name, "tables": tables}


def show(console: Console, papers: Sequence[Paper]) -> None:
    """Print all tables, and the mean errors of each paper and of all."""
    for paper in papers:
        for table in paper.tables:
            title, rows = f"{paper.name}: {table.title}", map(row_texts, table.cells)
            grid = terminal_table(title, COLUMNS[:1], COLUMNS[1:], rows)
            grid.columns[0].overflow = "fold"
            console.print(grid)
        console.print(summary(paper), soft_wrap=True)
    if len(papers) > 1:
        cells = [cell for paper in papers for cell in paper.cells]
        console.print(f"all papers: {_errors(cells)}", soft_wrap=True)


def row_texts(cell: PaperCell) -> tuple[str, ...]:
    """Return the texts of a cell below `COLUMNS`."""
    if cell.error is None:
        error = "" if cell.agrees is None else "agrees" if cell.agrees else "differs"
    else:
        error = "0 %" if cell.basis is Basis.EXACT and not cell.error else f"{cell.error:+.1%}"
    return cell.name, _shown(cell.printed), _shown(cell.ours), error, cell.basis.value


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.10g}" if float(value).is_integer() else f"{value:.4g}"


def summary(paper: Paper) -> str:
    """Return the number of calibrated constants and the errors in a line."""
    constants = f"{len(paper.calibrated)} calibrated constants"
    return f"{paper.name}: {constants}; {_errors(list(paper.cells))}"


def _errors(cells: Sequence[PaperCell]) -> str:
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
