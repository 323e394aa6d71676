"""A paper's tables, cell by cell: what it printed, and what Paceline says."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean


class Basis(StrEnum):
    """How our value of a cell came about.

    `EXACT` follows from definitions alone, and has to agree to the last printed digit. `CALIBRATED`
    is a cell from which a constant was taken, so that agreeing proves nothing. `PREDICTED` is all
    else.
    """

    PREDICTED = "predicted"
    CALIBRATED = "calibrated"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Cell:
    """One printed value, a number or a choice such as the fastest method, and ours."""

    name: str
    printed: float | str
    ours: float | str
    basis: Basis

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
        """Whether a choice is the printed one; None for numbers."""
        return self.printed == self.ours if isinstance(self.printed, str) else None


@dataclass(frozen=True, slots=True)
class Table:
    """A table or a figure of a paper; its title names both, and the unit."""

    title: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper, and the constants that were calibrated: of each its name and what it was taken from.

    Raises ValueError if there are more of them than a third of the predicted cells.
    """

    name: str
    citation: str
    tables: tuple[Table, ...]
    calibrated: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if 3 * len(self.calibrated) > self.num(Basis.PREDICTED):
            raise ValueError(
                f"{self.name}: {len(self.calibrated)} calibrated constants are too many for "
                f"{self.num(Basis.PREDICTED)} predicted cells"
            )

    @property
    def cells(self) -> Iterator[Cell]:
        """All cells of all tables."""
        return (cell for table in self.tables for cell in table.cells)

    def num(self, basis: Basis) -> int:
        """Return how many cells came about so."""
        return sum(cell.basis is basis for cell in self.cells)


def mean_error(cells: Iterable[Cell]) -> float | None:
    """Return the mean absolute relative error of the predicted numbers; None if there are none."""
    errors = [
        abs(cell.error)
        for cell in cells
        if cell.basis is Basis.PREDICTED and cell.error is not None
    ]
    return mean(errors) if errors else None
