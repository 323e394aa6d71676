"""Write the tables of a paper as Markdown, as the README of a paper has them."""

from paceline.studies.papers.headline import COLUMNS, row_texts, summary
from paceline.studies.papers.paper_tables import Paper


def markdown(paper: Paper) -> str:
    """Return all tables and the mean errors as Markdown, for a README."""
    blocks = []
    for table in paper.tables:
        lines = [f"**{table.title}**", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        lines += [f"| {' | '.join(row_texts(cell))} |" for cell in table.cells]
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, summary(paper)])
