"""Print a plan as terminal tables, Markdown or JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from paceline.core.timeline import Origin
from paceline.records.result import PlanResult, PlanRow
from paceline.report import advice
from paceline.report.plans import explanation, plan_tables, recommendation
from paceline.report.terminal import shown

Form = Literal["text", "markdown", "json"]
_MOST_REMARKS = 2


def present(
    out: Console, result: PlanResult, title: str, folder: Path | None, *, form: Form, drawing: str
) -> None:
    """Print a plan; with a drawing, print its explanation, too.

    `folder`: where the plan was saved, if it was.
    """
    if form == "json":
        out.print_json(data=_data(result, folder, drawing), highlight=out.is_terminal)
        return
    remarks = list(advice.shown(result.findings))[:_MOST_REMARKS]
    texts = [recommendation(result), *remarks]
    if form == "markdown":
        out.print(_markdown(result, title, texts), soft_wrap=True)
        return
    ranking = result.ranking
    for table in in_terminal(ranking.plans, title, ranking.alone_samples_per_s):
        out.print(table)
    if drawing:
        texts += [*explanation(ranking), drawing]
    if folder:
        texts.append(f"written    {folder}/result.json, trace.json, report.html")
    for text in filter(None, texts):
        out.print(text, soft_wrap=True)


def in_terminal(
    plans: Sequence[PlanRow], title: str, alone_samples_per_s: float | None
) -> Iterator[Table]:
    """Yield the tables of plans for a terminal; the first one has the title."""
    for name, table in plan_tables(plans, alone_samples_per_s).items():
        yield shown(f"{title}: {name.lower()}" if title else name, table, gap=1)
        title = ""


def _markdown(result: PlanResult, title: str, texts: Sequence[str]) -> str:
    tables = plan_tables(result.ranking.plans, result.ranking.alone_samples_per_s)
    parts = [f"**{title}**"]
    for name, table in tables.items():
        parts += [f"*{name}*", table.as_markdown]
    return "\n\n".join(filter(None, [*parts, *texts]))


def _data(result: PlanResult, folder: Path | None, drawing: str) -> dict[str, Any]:
    """Return the JSON object of --json."""
    data = result.model_dump(include={"model", "machine", "batch_size"})
    data |= {"origin": Origin.PREDICTED} | result.ranking.model_dump()
    data["findings"] = [one.model_dump() for one in result.findings]
    data |= {"drawing": drawing} if drawing else {}
    return data | ({"folder": str(folder)} if folder else {})
