"""Show a study in a terminal: progress, a table of cells, and advice."""

from collections.abc import Sequence
from math import inf

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as TerminalTable

from paceline.core.timeline import Origin
from paceline.records.scale import ScaleCell, ScaleResult, Scaling
from paceline.report import advice
from paceline.report.format import duration
from paceline.report.tables import Table
from paceline.report.terminal import shown
from paceline.studies.scale.study_runs import StudyRun

_RANGES = "predicted ranges are meant to contain 9 of 10 measured epochs"
_QUARTILES = "other ranges are quartiles of repetitions"


def cells_table(cells: Sequence[ScaleCell]) -> TerminalTable:
    """Return a table of cells in 80 columns; the title names what all cells share."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    spread = "range" if Origin.PREDICTED in kinds else "quartiles"
    head = ("method", "workers", "batch", "kind", "epoch", spread, "compute", "exposed", "memory")
    rows = list(map(_row, cells))
    needless = ["kind"] if len(kinds) == 1 else []
    needless += [] if any(row[head.index(spread)] for row in rows) else [spread]
    title = f"Seconds of an epoch, {' and '.join(kinds)}; memory in MiB"
    drawn = shown(title, Table(head, rows, (0, 3)).without(*needless), gap=1)
    for column in drawn.columns:
        # Words may be cut in a narrow terminal, numbers may not.
        column.no_wrap = column.header != "kind"
    return drawn


_OF_BATCH: dict[Scaling, str] = {"strong": "", "strong-per-worker": "/w.", "weak": " each"}


def _row(cell: ScaleCell) -> tuple[str, ...]:
    computed = ends = None
    if cell.forward_s is not None and cell.backward_s is not None:
        computed = cell.forward_s + cell.backward_s
    if cell.spread is not None and cell.spread[0] != cell.spread[1]:
        ends = "-".join(map(_seconds, cell.spread))
    return (
        cell.method,
        str(cell.workers),
        str(cell.batch) + _OF_BATCH[cell.scaling],
        cell.kind,
        "failed" if cell.error is not None else _seconds(cell.epoch_s),
        ends or "",
        _seconds(computed),
        _seconds(cell.exposed_s),
        "" if cell.memory_bytes is None else f"{cell.memory_bytes / 2**20:,.0f}",
    )


def _seconds(value: float | None) -> str:
    """Format seconds with three significant digits, or without decimals from 100 s upwards."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def sentences(result: ScaleResult) -> list[str]:
    """Return the lines below the table: errors, the meaning of spreads, advice."""
    failed: dict[str, list[ScaleCell]] = {}
    for cell in result.cells:
        if cell.error is not None:
            failed.setdefault(cell.error, []).append(cell)
    lines = []
    for reason, (first, *others) in failed.items():
        point = f"{first.method} {first.workers} {first.batch} {first.scaling} {first.kind}"
        more = f" (and {len(others)} more)" if others else ""
        lines.append(f"failed: {point}: {reason}{more}")
    kinds = {cell.kind for cell in result.cells if cell.spread is not None}
    if Origin.PREDICTED in kinds:
        lines.append(_RANGES if len(kinds) == 1 else f"{_RANGES}; {_QUARTILES}")
    return [*lines, *advice.shown(result.findings)]


class StudyProgress(Progress):
    """A bar of repetitions with the remaining time; without a terminal, a line for each run."""

    def __init__(self, console: Console, num_repetitions: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            speed_estimate_period=inf,
        )
        self._task = self.add_task("", total=num_repetitions)
        self.advance(self._task, 0)  # the estimate counts the time from here

    def begin(self, run: StudyRun) -> None:
        """Show the name of the run whose repetition begins."""
        self.update(self._task, description=run.label)

    def done(self, run: StudyRun, cells: Sequence[ScaleCell]) -> None:
        """Count a repetition; `cells`: the run's cells, if this was its last repetition."""
        self.advance(self._task)
        if not cells or self.console.is_terminal:
            return
        (task,), first = self.tasks, cells[0]
        epoch = f"failed: {first.error}" if first.epoch_s is None else duration(first.epoch_s)
        left = f"; about {duration(task.time_remaining)} left" if task.time_remaining else ""
        line = f"{task.completed:.0f}/{task.total or 0:.0f}: {run.label}: {epoch}{left}"
        self.console.print(line, soft_wrap=True)
