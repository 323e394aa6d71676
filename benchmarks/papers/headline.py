"""Sum up how well the plans predict the papers, beside naive predictors; as text and as JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from paceline.report.terminal import table as terminal_table
from papers.paper_tables import Paper, PaperCell

COLUMNS = ("", "printed", "ours", "error")
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
    """Return the errors of these cells."""
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


def as_object(papers: Sequence[Paper]) -> dict[str, Any]:
    """Return the papers as `--json` prints them."""
    return {
        "papers": [
            {**asdict(paper), "headline": asdict(headline(paper.cells))} for paper in papers
        ],
        "headline": asdict(headline(cell for paper in papers for cell in paper.cells)),
    }


def show(console: Console, papers: Sequence[Paper]) -> None:
    """Print all tables, and then the headlines."""
    for paper in papers:
        for table in paper.tables:
            title, rows = f"{paper.name}: {table.title}", map(row_texts, table.cells)
            grid = terminal_table(title, COLUMNS[:1], COLUMNS[1:], rows)
            grid.columns[0].overflow = "fold"
            console.print(grid)
    title = "Mean absolute errors, and the overhead's signed error"
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
        "" if one.error is None else f"{one.error:.1%}",
        _versus_text(one.mean),
        _versus_text(one.alpha_beta),
        "" if one.overhead is None else f"{one.overhead:+.0%} of {one.num_overheads}",
        f"{one.num_agreeing_choices} of {one.num_choices}" if one.num_choices else "",
    )


def _versus_text(found: Versus | None) -> str:
    return "" if found is None else f"{found.error:.1%}; ours {found.ours:.1%} of {found.num_cells}"


def row_texts(cell: PaperCell) -> tuple[str, ...]:
    """Return the texts of a cell below `COLUMNS`."""
    if cell.agrees is None:
        said = "" if cell.error is None else f"{cell.error:+.1%}"
    else:
        said = "agrees" if cell.agrees else "differs"
    return cell.name, _shown(cell.printed), _shown(cell.ours), said


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.10g}" if float(value).is_integer() else f"{value:.4g}"


def markdown(paper: Paper) -> str:
    """Return all tables and the errors as Markdown."""
    blocks = []
    for table in paper.tables:
        lines = [f"**{table.title}**", ""]
        lines += _rows(COLUMNS, map(row_texts, table.cells))
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, "\n".join(_rows(("", *_HEADLINES), headline_rows([paper])))])


def _rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = [f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def fill_page(paper: Paper) -> None:
    """Put the tables of a paper into its page, NAME.md."""
    path = Path(__file__).parent / f"{paper.name}.md"
    before, _, rest = path.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- /tables -->")[2]
    path.write_text(f"{before}<!-- tables -->\n{markdown(paper)}\n<!-- /tables -->{after}")
