"""Combine a paper's printed values with our values and the values of naive predictors.

The file NAME.toml next to this module has the printed values of a paper. Each of its cells has

- `cell`, its name; `printed`, its value; `of`, the arguments from which our value is computed;
- `kind`: we compute only "predicted" cells, from inputs other than the cell's own run: the network,
  the machine file, and constants from other runs. "calibrated" cells provided such constants,
  "derived" cells follow from another printed cell, and "exact" cells are definitions. These three
  kinds count only for the mean of a table;
- the ideal value, if the cell is a time or a speed-up of several workers: a time is the value of
  the cell named by `alone`, divided by `workers`; a speed-up is `workers`;
- `series`, if a table has cells of several kinds: a mean is computed within each series.
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
    """One printed value, a number or a choice such as the fastest method, and our value.

    `mean`, `alpha_beta`: values of predictors without simulation; None if undefined. `mean`: the
    mean printed value of the cell's series, including this cell. If the cell has an ideal value,
    the series' slow-downs or efficiencies are averaged instead. `alpha_beta`: computation, then the
    exchange of all gradients, on the same machine. `ideal`: the value of workers without overhead,
    from the printed values and from ours.
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
        """Our relative error; None for choices, and for a printed 0."""
        return None if isinstance(self.ours, str) else self.error_of(self.ours)

    def error_of(self, value: float) -> float | None:
        """Return the relative error of `value`; None for choices, and for a printed 0."""
        if isinstance(self.printed, str) or not self.printed:
            return None
        return value / self.printed - 1

    @property
    def overhead_error(self) -> float | None:
        """The relative error of our overhead; None without an ideal value or printed overhead.

        The overhead is the difference between a step time or speed-up and its ideal value.
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
    """The predicted cells of a paper's table or figure; `title` has its name and the unit."""

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


# Values of a table's cells: by cell name, or a function of the cell's arguments `of`.
Ours = Mapping[str, float | str] | Callable[..., float | str]
# Values of alpha-beta; None or a missing name if it does not predict the cell.
Values = Mapping[str, float] | Callable[..., float | None]
Row = Mapping[str, Any]


@cache
def read_printed(name: str) -> dict[str, Any]:
    """Read the data file of a paper, NAME.toml."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def printed_values(name: str, table: str) -> dict[tuple[Any, ...], Any]:
    """Return the printed values of a paper's table, by the arguments `of` of our value.

    A cell without arguments has the key `(name,)`.
    """
    (found,) = (one for one in read_printed(name)["tables"] if one["name"] == table)
    return {tuple(row.get("of", [row["cell"]])): row["printed"] for row in found["cells"]}


def paper_of(name: str, ours: Mapping[str, Ours], alpha_beta: Mapping[str, Values] = {}) -> Paper:
    """Return a paper with our and alpha-beta's values, which are given by table name."""
    tables = {table["name"]: table for table in read_printed(name)["tables"]}
    found = []
    for table, own in ours.items():
        cells = table_cells(tables[table]["cells"], own, alpha_beta.get(table, {}))
        found.append(PaperTable(tables[table]["title"], tuple(cells)))
    return Paper(name, tuple(found))


def table_cells(rows: Sequence[Row], ours: Ours, alpha_beta: Values) -> Iterator[PaperCell]:
    """Yield a table's predicted cells; numbers also have the naive predictors' values."""
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
    """Predict each cell by the mean of its series; return the values by cell name.

    Cells with an ideal value are averaged separately, relative to it. Series of fewer than two
    different values are omitted, because their mean is the cell itself.
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
