"""Hold the predicted cells of a paper's tables: the printed values, ours, and naive predictors'.

What a paper prints stands in the TOML file of its name beside this module. Each of its cells has

- `cell`, its name, and `printed`, the value; `of`, the arguments which ours is computed from;
- `kind`: only a cell that is "predicted" is computed. Its value comes from inputs that are not that
  run: the network, the machine's file, constants of other runs. The others are what these constants
  were taken from ("calibrated"), what follows from another printed cell ("derived"), or definitions
  ("exact"); they count for the mean of a table;
- where it is a time or a speed-up of several workers, what an ideal run would print: the value of
  the cell called `alone`, divided by `workers`, or a speed-up of `workers`;
- `series`, where the table's cells are not of one kind: those whose mean is comparable.
"""

import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any


@dataclass(frozen=True, slots=True)
class PaperCell:
    """One printed value, a number or a choice such as the fastest method, and ours.

    `mean` and `alpha_beta` are the values of two predictors that simulate nothing; None where one
    is not defined. `mean` is that of the printed values of the cell's series, this one among them:
    of its slow-downs or efficiencies where the cell has an ideal value. `alpha_beta` is computation
    and, after it, the exchange of all gradients, on the same machine. `ideal` are the value of
    workers that lose nothing as the paper prints it, and as we compute it.
    """

    name: str
    printed: float | str
    ours: float | str
    mean: float | None = None
    alpha_beta: float | None = None
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
        if isinstance(self.printed, str) or not self.printed:
            return None
        return value / self.printed - 1

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
        """Whether a choice matches the paper; None for numbers."""
        return self.printed == self.ours if isinstance(self.printed, str) else None


@dataclass(frozen=True, slots=True)
class PaperTable:
    """The predicted cells of a table or a figure of a paper; its title names it, and the unit."""

    title: str
    cells: tuple[PaperCell, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper and its tables."""

    name: str
    tables: tuple[PaperTable, ...]

    @property
    def cells(self) -> Iterator[PaperCell]:
        """All cells of all tables."""
        return (cell for table in self.tables for cell in table.cells)


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


def paper_of(name: str, ours: Mapping[str, Ours], alpha_beta: Mapping[str, Values] = {}) -> Paper:
    """Return a paper with the values of `ours` and of `alpha_beta` for each table by its name."""
    tables = {table["name"]: table for table in read_printed(name)["tables"]}
    found = []
    for table, own in ours.items():
        cells = table_cells(tables[table]["cells"], own, alpha_beta.get(table, {}))
        found.append(PaperTable(tables[table]["title"], tuple(cells)))
    return Paper(name, tuple(found))


def table_cells(rows: Sequence[Row], ours: Ours, alpha_beta: Values) -> Iterator[PaperCell]:
    """Yield the predicted cells of a table, with the naive predictors' values of the numbers."""
    means, by_name = series_means(rows), {row["cell"]: row for row in rows}
    for row in rows:
        if row["kind"] != "predicted":
            continue
        label, printed, own = row["cell"], row["printed"], _value(ours, row)
        if isinstance(printed, str):
            yield PaperCell(label, printed, own)
            continue
        ideal = None
        if "alone" in row:
            alone, workers = by_name[row["alone"]], row.get("workers", 1)
            ideal = alone["printed"] / workers, float(_value(ours, alone)) / workers
        elif "workers" in row:
            ideal = float(row["workers"]), float(row["workers"])
        yield PaperCell(label, printed, own, means.get(label), _naive(alpha_beta, row), ideal)


def series_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return what the mean of each cell's series says of it, by the names of the cells.

    A cell with an ideal value belongs with the others that have one. Series of fewer than two
    different values are left out: their mean is the cell itself.
    """
    printed = {row["cell"]: row["printed"] for row in rows}
    series: dict[tuple[str | None, bool], list[tuple[str, float, float]]] = defaultdict(list)
    for row in rows:
        if not isinstance(row["printed"], str):
            is_alone = "alone" not in row and "workers" not in row
            alone = printed[row["alone"]] / row.get("workers", 1) if "alone" in row else None
            scale = float(alone or row.get("workers", 1))
            entry = row["cell"], scale, row["printed"] / scale
            series[row.get("series"), is_alone].append(entry)
    found: dict[str, float] = {}
    for entries in series.values():
        if len({ratio for _, _, ratio in entries}) > 1:
            middle = mean(ratio for _, _, ratio in entries)
            found |= {label: scale * middle for label, scale, _ in entries}
    return found


def _value(ours: Ours, row: Row) -> float | str:
    return ours[row["cell"]] if isinstance(ours, Mapping) else ours(*row["of"])


def _naive(values: Values, row: Row) -> float | None:
    return values.get(row["cell"]) if isinstance(values, Mapping) else values(*row["of"])
