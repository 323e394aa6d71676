"""Tables that both pages and terminals can show, including the tables of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Self

from paceline.core.compare import Comparison
from paceline.core.outcome import Traffic
from paceline.records.result import PlanRow, RunResult
from paceline.report.figures import PARTS, Fill
from paceline.report.format import (
    Quantity,
    change_text,
    duration,
    nbytes,
    number,
    optional_share,
    share,
)

Rows = list[tuple[str, ...]]


class Marked(str):
    """A text that a page shows next to a coloured square (`fill`) or a small label (`chip`)."""

    __slots__ = ("chip", "fill")
    chip: str
    fill: Fill | None

    def __new__(cls, text: str, *, chip: str = "", fill: Fill | None = None) -> Self:
        """Create the str `text`, and attach `chip` and `fill`."""
        marked = super().__new__(cls, text)
        marked.chip, marked.fill = chip, fill
        return marked


def part_name(part: str) -> str:
    """Return the label of a part of a step, such as "weight update" for "update".

    The label is marked with the colour that the part has in figures, if any.
    """
    fill = PARTS.get(part)
    return part if fill is None else Marked(fill.label, fill=fill)


class Column(NamedTuple):
    """A column's heading (`name`), `kind` ("text" or "number"), and unit of all cells, if any."""

    name: str
    kind: str
    unit: str | None


@dataclass(frozen=True)
class Table:
    """A table with headings (`head`) and `rows`; `text`: indices of columns without numbers."""

    head: Sequence[str]
    rows: Rows
    text: Sequence[int] = (0,)

    @cached_property
    def columns(self) -> list[Column]:
        """The columns; a column's unit is None unless all its quantities have the same unit."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.head)
        found = [{cell.unit for cell in cells if isinstance(cell, Quantity)} for cells in columns]
        units = [each.pop() if len(each) == 1 else None for each in found]
        kinds = ("text" if i in self.text else "number" for i in range(len(self.head)))
        return list(map(Column, self.head, kinds, units))

    @property
    def as_markdown(self) -> str:
        """The table in Markdown."""
        rules = ("---" if column.kind == "text" else "---:" for column in self.columns)
        lines = (self.head, tuple(rules), *self.rows)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def without(self, *names: str) -> "Table":
        """Return the table without the named columns."""
        kept = [i for i, name in enumerate(self.head) if name not in names]
        return Table(
            [self.head[i] for i in kept],
            [tuple(row[i] for i in kept) for row in self.rows],
            [new for new, old in enumerate(kept) if old in self.text],
        )


def comparison_table(comparison: Comparison, *, two_runs: bool = False) -> Table:
    """Return a table that compares the parts of a step in two timelines.

    With `two_runs` the last column is the change from left to right. Otherwise the left timeline is
    a prediction, and the last column is the prediction error.
    """
    rows: Rows = []
    for row in comparison.rows:
        change = row.right_s / row.left_s - 1 if row.left_s else None
        off = change_text(change if two_runs else row.error)
        rows.append((part_name(row.quantity), duration(row.left_s), duration(row.right_s), off))
    last = "change" if two_runs else f"error of {comparison.left}"
    return Table(("per step", comparison.left, comparison.right, last), rows)


def trials_table(result: RunResult) -> Table:
    """Return a table of the chunk sizes (layers exchanged together) that the run tried."""
    rows: Rows = []
    for trial in result.trials:
        mark = "chosen" if trial.chunk == result.config.get("chunk") else ""
        seconds = duration(trial.predicted_s), duration(trial.rehearsed_s)
        rows.append((str(trial.chunk), *seconds, mark))
    return Table(("layers", "predicted step", "rehearsed step", ""), rows, (3,))


def workers_table(result: RunResult) -> Table:
    """Return a table with a row for each asynchronous worker: settings, samples and updates."""
    made: Mapping[str, int] = {} if result.updates is None else result.updates.by_worker
    by_name = {worker.name: worker for worker in result.workers}
    total = sum(made.values()) or 1
    rows: Rows = []
    for name in dict.fromkeys([*made, *by_name]):
        asked, predicted, count = ("-", "-", "-"), None, made.get(name, 0)
        if name in by_name:
            worker = by_name[name]
            tried, predicted = worker.tried_samples_per_s, worker.predicted_share
            asked = (worker.spec, "-" if tried is None else number(tried), f"{worker.samples:,}")
        busy = optional_share(result.utilisation.get(name))
        shares = share(count / total), optional_share(predicted), busy
        rows.append((name, *asked, f"{count:,}", *shares))
    head = ("worker", "asked for", "tried", "samples", "updates", "share", "predicted", "busy")
    table = Table(head, rows, (0, 1))
    return table if result.utilisation.keys() & by_name.keys() else table.without("busy")


def traffic_table(traffic: Sequence[Traffic], num_updates: int = 0) -> Table:
    """Return a table of bytes by the purpose of messages: planned, counted, and per update.

    `num_updates`: number of updates by which the counted bytes are divided; 0 omits this column.
    """
    rows: Rows = []
    for row in traffic:
        where = "between processes" if row.travels else "within its process"
        of_an_update = (nbytes(row.nbytes / num_updates),) if num_updates else ()
        amounts = nbytes(row.planned_nbytes), nbytes(row.nbytes), *of_an_update
        rows.append((row.purpose, where, *amounts))
    last = ("of an update",) if num_updates else ()
    return Table(("purpose", "where", "planned", "counted", *last), rows, (0, 1))


def plan_name(plan: PlanRow) -> str:
    """Return a plan's strategy and codec; "balanced" means that faster workers get more samples."""
    name = f"{plan.strategy} + {plan.codec}" if plan.codec else plan.strategy
    return f"{name}, balanced" if plan.is_balanced else name


def ranged_step(plan: PlanRow) -> Quantity:
    """Format a plan's step time with its predicted range, such as "12.3 ms ±5 %"."""
    step = duration(plan.step_s)
    return Quantity(f"{step} ±{share(plan.range_share, 0)}", step.value, step.unit)


def plans_table(plans: Sequence[PlanRow]) -> Table:
    """Return a table of plans; the column "efficiency" is omitted if no plan's is known."""
    rows: Rows = []
    for plan in plans:
        speed = ranged_step(plan), number(plan.samples_per_s), optional_share(plan.efficiency)
        sizes = nbytes(plan.wire_nbytes_per_step), nbytes(plan.fullest_nbytes)
        asked = plan_name(plan), str(plan.workers), plan.placement
        rows.append((*asked, *speed, duration(plan.exposed_s), *sizes, plan.explanation))
    head = ("strategy", "workers", "devices", "step", "samples/s", "efficiency", "exposed")
    table = Table((*head, "wire/step", "memory", "why"), rows, (0, 2, 9))
    knows_efficiency = any(plan.efficiency is not None for plan in plans)
    return table if knows_efficiency else table.without("efficiency")
