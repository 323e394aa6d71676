"""Combine a paper's printed values with our values, and format them as Markdown tables.

The file NAME.toml next to this module has the printed values of a paper. Each of its cells has

- `cell`, its name; `printed`, its value; `of`, the arguments from which our value is computed;
- `kind`: we compute only "predicted" cells, from inputs other than the cell's own run: the network,
  the machine file, and constants from other runs. "calibrated" cells provided such constants,
  "derived" cells follow from another printed cell, and "exact" cells are definitions.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from figures import table

_HERE = Path(__file__).parent
_MARKS = "<!-- tables -->\n", "<!-- /tables -->"
# Values of a table's cells: by cell name, or a function of the cell's arguments `of`.
Ours = Mapping[str, float | str] | Callable[..., float | str]


class PaperCell(NamedTuple):
    """One printed value, a number or a choice such as the fastest method, and our value."""

    name: str
    printed: float | str
    ours: float | str

    @property
    def error(self) -> float | None:
        """Our relative error; None for choices, and for a printed 0."""
        if isinstance(self.ours, str) or isinstance(self.printed, str) or not self.printed:
            return None
        return self.ours / self.printed - 1

    @property
    def agrees(self) -> bool | None:
        """Whether a choice matches the paper; None for numbers."""
        return self.printed == self.ours if isinstance(self.printed, str) else None

    def texts(self) -> tuple[str, ...]:
        """Return a table row: name, printed, ours, error."""
        if self.agrees is None:
            said = "" if self.error is None else f"{self.error:+.1%}"
        else:
            said = "agrees" if self.agrees else "differs"
        return self.name, _shown(self.printed), _shown(self.ours), said


class PaperTable(NamedTuple):
    """The predicted cells of a paper's table or figure; `title` has its name and the unit."""

    title: str
    cells: tuple[PaperCell, ...]


class Paper(NamedTuple):
    """A paper and its tables."""

    name: str
    tables: tuple[PaperTable, ...]


@cache
def read_printed(name: str) -> dict[str, Any]:
    """Read the data file of a paper, NAME.toml."""
    return tomllib.loads((_HERE / f"{name}.toml").read_text(encoding="utf-8"))


def printed_values(name: str, title: str) -> dict[tuple[Any, ...], Any]:
    """Return the printed values of a paper's table, by the arguments `of` of our value.

    A cell without arguments has the key `(name,)`.
    """
    (found,) = (one for one in read_printed(name)["tables"] if one["name"] == title)
    return {tuple(row.get("of", [row["cell"]])): row["printed"] for row in found["cells"]}


def paper_of(name: str, ours: Mapping[str, Ours]) -> Paper:
    """Return a paper with our values of its predicted cells, which are given by table name."""
    tables = {one["name"]: one for one in read_printed(name)["tables"]}
    found = []
    for title, own in ours.items():
        cells = (
            PaperCell(
                row["cell"],
                row["printed"],
                own[row["cell"]] if isinstance(own, Mapping) else own(*row["of"]),
            )
            for row in tables[title]["cells"]
            if row["kind"] == "predicted"
        )
        found.append(PaperTable(tables[title]["title"], tuple(cells)))
    return Paper(name, tuple(found))


def headlines(papers: Sequence[Paper]) -> str:
    """Format a Markdown table of each paper's errors, and of all papers if several."""
    cells = {paper.name: [cell for one in paper.tables for cell in one.cells] for paper in papers}
    if len(papers) > 1:
        cells["all papers"] = [cell for own in cells.values() for cell in own]
    rows = []
    for name, own in cells.items():
        errors = [abs(cell.error) for cell in own if cell.error is not None]
        choices = [cell.agrees for cell in own if cell.agrees is not None]
        error = f"{mean(errors):.1%}" if errors else ""
        agreed = f"{sum(choices)} of {len(choices)}" if choices else ""
        rows.append((name, str(len(errors)), error, agreed))
    return table("", ("", "predicted", "error", "choices"), rows)


def markdown(paper: Paper) -> str:
    """Format a paper's tables and its errors as Markdown."""
    head = ("", "printed", "ours", "error")
    blocks = [table(one.title, head, [cell.texts() for cell in one.cells]) for one in paper.tables]
    return "\n\n".join([*blocks, headlines([paper])])


def fill_page(paper: Paper) -> None:
    """Write a paper's tables into its page, NAME.md."""
    path = _HERE / f"{paper.name}.md"
    before, begin, rest = path.read_text().partition(_MARKS[0])
    _, end, after = rest.partition(_MARKS[1])
    path.write_text(f"{before}{begin}{markdown(paper)}\n{end}{after}")


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.10g}" if float(value).is_integer() else f"{value:.4g}"
