"""Summarise the plans' errors on the papers' tables, compared with naive predictors."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from papers.paper_tables import Paper, PaperCell

_COLUMNS = ("", "printed", "ours", "error")
_HEADLINES = ("", "predicted", "error", "mean of the table", "alpha-beta", "overhead", "choices")
HOW_TO_READ = (
    "mean of the table: every cell is the mean of its printed series, itself among them. "
    "alpha-beta: computation and, after it, the exchange of all gradients. Both with our error "
    "over the same cells, where they say anything. overhead: of what several workers lose."
)


@dataclass(frozen=True, slots=True)
class Versus:
    """Mean absolute errors of a naive predictor and of our plans over the same cells."""

    num_cells: int
    error: float
    ours: float

    def __str__(self) -> str:
        return f"{self.error:.1%}; ours {self.ours:.1%} of {self.num_cells}"


@dataclass(frozen=True, slots=True)
class Headline:
    """Errors over predicted cells, as fractions; None without such cells.

    `overhead`: mean signed error of the overhead of several workers, over the `num_overheads` cells
    that contain a time or speed-up of several workers.
    """

    num_predicted: int
    error: float | None
    mean: Versus | None
    alpha_beta: Versus | None
    num_overheads: int
    overhead: float | None
    num_choices: int
    num_agreeing_choices: int

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a table row with the columns `_HEADLINES`."""
        return (
            name,
            str(self.num_predicted),
            "" if self.error is None else f"{self.error:.1%}",
            str(self.mean or ""),
            str(self.alpha_beta or ""),
            "" if self.overhead is None else f"{self.overhead:+.0%} of {self.num_overheads}",
            f"{self.num_agreeing_choices} of {self.num_choices}" if self.num_choices else "",
        )


def headline(cells: Iterable[PaperCell]) -> Headline:
    """Summarise the errors of these cells."""
    cells = list(cells)
    errors = _absolute(cell.error for cell in cells)
    choices = [cell.agrees for cell in cells if cell.agrees is not None]
    overheads = [cell.overhead_error for cell in cells if cell.overhead_error is not None]
    return Headline(
        num_predicted=len(errors),
        error=mean(errors) if errors else None,
        mean=_versus(cells, lambda cell: cell.mean),
        alpha_beta=_versus(cells, lambda cell: cell.alpha_beta),
        num_overheads=len(overheads),
        overhead=mean(overheads) if overheads else None,
        num_choices=len(choices),
        num_agreeing_choices=sum(choices),
    )


def _versus(
    cells: Iterable[PaperCell], value_of: Callable[[PaperCell], float | None]
) -> Versus | None:
    both = [(cell, value) for cell in cells if (value := value_of(cell)) is not None]
    theirs = _absolute(cell.error_of(value) for cell, value in both)
    ours = _absolute(cell.error for cell, _ in both)
    return Versus(len(theirs), mean(theirs), mean(ours)) if theirs else None


def _absolute(errors: Iterable[float | None]) -> list[float]:
    return [abs(error) for error in errors if error is not None]


def headlines(papers: Sequence[Paper]) -> str:
    """Format a Markdown table of each paper's headline, and of all papers if several."""
    rows = [headline(paper.cells).texts(paper.name) for paper in papers]
    if len(papers) > 1:
        every = headline(cell for paper in papers for cell in paper.cells)
        rows.append(every.texts("all papers"))
    return _table(_HEADLINES, rows)


def markdown(paper: Paper) -> str:
    """Format a paper's tables and headline as Markdown."""
    blocks = [
        f"**{table.title}**\n\n{_table(_COLUMNS, map(_texts, table.cells))}"
        for table in paper.tables
    ]
    return "\n\n".join([*blocks, headlines([paper])])


def _texts(cell: PaperCell) -> tuple[str, ...]:
    if cell.agrees is None:
        said = "" if cell.error is None else f"{cell.error:+.1%}"
    else:
        said = "agrees" if cell.agrees else "differs"
    return cell.name, _shown(cell.printed), _shown(cell.ours), said


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.10g}" if float(value).is_integer() else f"{value:.4g}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def fill_page(paper: Paper) -> None:
    """Write a paper's tables into its page, NAME.md."""
    path = Path(__file__).parent / f"{paper.name}.md"
    before, _, rest = path.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- /tables -->")[2]
    path.write_text(f"{before}<!-- tables -->\n{markdown(paper)}\n<!-- /tables -->{after}")
