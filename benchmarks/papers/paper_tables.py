"""Hold a paper's tables cell by cell: the printed values, ours, and what ours rest on.

What a paper prints stands in the TOML file of its name beside this module. Each of its cells has

- `cell`, its name, and `printed`, the value; `of`, the arguments which ours is computed from;
- `kind`, a `Basis`;
- where it is a time or a speed-up of several workers, what an ideal run would print: the value of
  the cell called `alone`, divided by `workers`, or a speed-up of `workers`;
- `series`, where the table's cells are not of one kind: those whose mean is comparable.
"""

import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any


class Basis(StrEnum):
    """The origin of our value of a cell; only `PREDICTED` ones count for an error.

    `PREDICTED` comes from inputs that are not that run: the network, the machine's file, constants
    of other runs. `DERIVED` is arithmetic on printed cells, or follows from another printed cell
    without a plan. A constant was taken from a `CALIBRATED` cell, or chosen in view of it, or its
    own run is an input. `EXACT` follows from definitions, and is compared to the last digit.
    """

    PREDICTED = "predicted"
    DERIVED = "derived"
    CALIBRATED = "calibrated"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Naive:
    """The values of two predictors that simulate nothing; None where one is not defined.

    `mean` is the mean of the printed values of the cell's series, this one among them: of its
    slow-downs or efficiencies where the cell has an ideal value. It is not defined for a series of
    one value. `alpha_beta` is computation and, after it, the exchange of all gradients, on the
    same machine.
    """

    mean: float | None = None
    alpha_beta: float | None = None


@dataclass(frozen=True, slots=True)
class PaperCell:
    """One printed value, a number or a choice such as the fastest method, and ours.

    `ideal` are the value of workers that lose nothing as the paper prints it, and as we compute it.
    """

    name: str
    printed: float | str
    ours: float | str
    basis: Basis
    naive: Naive = Naive()
    ideal: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.printed, str) != isinstance(self.ours, str):
            raise ValueError(f"{self.name}: {self.printed!r} and {self.ours!r} cannot be compared")

    @property
    def error(self) -> float | None:
        """Return our value over the printed one, less 1; None for choices, and for a printed 0."""
        return None if isinstance(self.ours, str) else self.error_of(self.ours)

    def error_of(self, value: float) -> float | None:
        """Return another predictor's value over the printed one, less 1."""
        return (
            None
            if isinstance(self.printed, str) or not self.printed
            else (value / self.printed - 1)
        )

    @property
    def overhead_error(self) -> float | None:
        """Return the error of what several workers lose; None if they are one, or lose nothing.

        That is a step's time less that of one worker, or their number less their speed-up.
        """
        if self.ideal is None or isinstance(self.printed, str) or isinstance(self.ours, str):
            return None
        lost = self.printed - self.ideal[0]
        return (self.ours - self.ideal[1]) / lost - 1 if lost else None

    @property
    def agrees(self) -> bool | None:
        """True if a choice or an exact value is the printed one; None for other numbers."""
        if isinstance(self.printed, str) or self.basis is Basis.EXACT:
            return self.printed == self.ours
        return None


@dataclass(frozen=True, slots=True)
class PaperTable:
    """A table or a figure of a paper; its title names both, and the unit."""

    title: str
    cells: tuple[PaperCell, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper, its tables, and the name and the source of each calibrated constant."""

    name: str
    citation: str
    tables: tuple[PaperTable, ...]
    calibrated: tuple[tuple[str, str], ...] = ()

    @property
    def cells(self) -> Iterator[PaperCell]:
        """All cells of all tables."""
        return (cell for table in self.tables for cell in table.cells)

    def num(self, basis: Basis) -> int:
        """Return the number of cells of this origin."""
        return sum(cell.basis is basis for cell in self.cells)


# Values of a table's cells: by the cell's name, or computed of the arguments in the file.
Ours = Mapping[str, float | str] | Callable[..., float | str]
# Of alpha-beta; None, or no name, where it says nothing.
Values = Mapping[str, float] | Callable[..., float | None]
Row = Mapping[str, Any]


@cache
def read_printed(name: str) -> dict[str, Any]:
    """Return what stands in the data file of a paper."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def printed_values(name: str, table: str) -> dict[tuple[Any, ...], Any]:
    """Return the printed values of a paper's table, each under the arguments that ours is of.

    A cell without arguments is under its own name.
    """
    (found,) = (one for one in read_printed(name)["tables"] if one["name"] == table)
    return {tuple(row.get("of", [row["cell"]])): row["printed"] for row in found["cells"]}


def paper_of(
    name: str,
    ours: Mapping[str, Ours],
    alpha_beta: Mapping[str, Values] = {},
    shares: Mapping[str, float] = {},
) -> Paper:
    """Return a paper with the values of `ours` and of `alpha_beta` for each table by its name.

    `shares` are shown in per cent beside the names of their cells. ValueError for a cell that does
    not say what it rests on.
    """
    data = read_printed(name)
    tables = []
    for table in data["tables"]:
        own, naive = ours[table["name"]], alpha_beta.get(table["name"], {})
        cells = table_cells(table["cells"], own, naive)
        shown = (_with_share(cell, shares.get(cell.name)) for cell in cells)
        tables.append(PaperTable(table["title"], tuple(shown)))
    constants = tuple((constant, source) for constant, source in data["calibrated"])
    return Paper(name, data["citation"], tuple(tables), constants)


def table_cells(rows: Sequence[Row], ours: Ours, alpha_beta: Values) -> Iterator[PaperCell]:
    """Yield the cells of a table, with the naive predictors' values of the predicted numbers."""
    printed = {row["cell"]: row["printed"] for row in rows}
    values = {row["cell"]: _value(ours, row) for row in rows}
    means = series_means(rows)
    for row in rows:
        label, kind = row["cell"], row.get("kind")
        if kind not in set(Basis):
            raise ValueError(f"{label}: kind is one of {', '.join(Basis)}, not {kind!r}")
        basis, naive, ideal = Basis(kind), Naive(), None
        if basis is Basis.PREDICTED and not isinstance(row["printed"], str):
            naive = Naive(means.get(label), _alpha_beta(alpha_beta, row))
        if (own := _ideal(row, printed)) is not None:
            ideal = (own, float(_ideal(row, values) or 0.0))
        yield PaperCell(label, row["printed"], values[label], basis, naive, ideal)


def series_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return what the mean of each cell's series says of it, by the names of the cells.

    A cell with an ideal value belongs with the others that have one. Series of fewer than two
    different values are left out: their mean is the cell itself.
    """
    printed = {row["cell"]: row["printed"] for row in rows}
    series: dict[tuple[str | None, bool], list[tuple[str, float, float]]] = defaultdict(list)
    for row in rows:
        if not isinstance(row["printed"], str):
            ideal = _ideal(row, printed)
            scale = 1.0 if ideal is None else ideal
            entry = (row["cell"], scale, row["printed"] / scale)
            series[row.get("series"), ideal is None].append(entry)
    found: dict[str, float] = {}
    for entries in series.values():
        if len({ratio for _, _, ratio in entries}) > 1:
            middle = mean(ratio for _, _, ratio in entries)
            found |= {label: scale * middle for label, scale, _ in entries}
    return found


def _ideal(row: Row, values: Mapping[str, Any]) -> float | None:
    """Return what workers that lose nothing would print, given the values of the table's cells."""
    if "alone" in row:
        return float(values[row["alone"]] / row.get("workers", 1))
    return float(row["workers"]) if "workers" in row else None


def _value(ours: Ours, row: Row) -> float | str:
    return ours[row["cell"]] if isinstance(ours, Mapping) else ours(*row["of"])


def _alpha_beta(values: Values, row: Row) -> float | None:
    return values.get(row["cell"]) if isinstance(values, Mapping) else values(*row["of"])


def _with_share(cell: PaperCell, share: float | None) -> PaperCell:
    if share is None:
        return cell
    label = f"{cell.name} ({100 * share:.0f} %)"
    return PaperCell(label, cell.printed, cell.ours, cell.basis, cell.naive, cell.ideal)
