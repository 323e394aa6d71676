"""The tables of a paper as Markdown, and those that its README shows."""

from pathlib import Path

from papers.headline import COLUMNS, row_texts, summary
from papers.paper_tables import Paper


def markdown(paper: Paper) -> str:
    """Return all tables and the mean errors as Markdown."""
    blocks = []
    for table in paper.tables:
        lines = [f"**{table.title}**", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += [f"| {' | '.join(row_texts(cell))} |" for cell in table.cells]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, summary(paper)])


def readme(name: str) -> str:
    """Return the page of a paper."""
    return (Path(__file__).parent / f"{name}.md").read_text()


def shown_tables(name: str) -> str:
    """Return the tables on the page of a paper."""
    return readme(name).split("<!-- tables -->\n")[1].split("<!-- /tables -->")[0].strip()
