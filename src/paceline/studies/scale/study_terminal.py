"""Show a study in a terminal: progress, a table of cells, and advice."""

from collections.abc import Iterable, Sequence
from math import ceil, fsum
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from paceline.core.timeline import Origin
from paceline.records.scale import ScaleCell, ScaleResult, Scaling
from paceline.report import advice
from paceline.report.format import duration
from paceline.studies.scale.study_runs import StudyRun

_FEW_S = 100  # shown in seconds, not minutes
_RANGES = "predicted ranges are meant to contain 9 of 10 measured epochs"
_QUARTILES = "other ranges are quartiles of repetitions"


def cells_table(cells: Sequence[ScaleCell]) -> Table:
    """Return a table of cells in 80 columns; the title names what all cells share."""
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    title = f"Seconds of an epoch, {' and '.join(kinds)}; memory in MiB"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    spread = "range" if Origin.PREDICTED in kinds else "quartiles"
    rows = [_row(cell, spread) for cell in cells]
    needless = {"kind"} if len(kinds) == 1 else set()
    needless |= set() if any(row[spread] for row in rows) else {spread}
    heads = [head for head in rows[0] if head not in needless]
    for head in heads:
        justify: Literal["left", "right"] = "left" if head in ("method", "kind") else "right"
        # Words may be cut in a narrow terminal, numbers may not.
        table.add_column(head, justify=justify, no_wrap=head != "kind")
    for row in rows:
        table.add_row(*(row[head] for head in heads))
    return table


_OF_BATCH: dict[Scaling, str] = {"strong": "", "strong-per-worker": "/w.", "weak": " each"}


def _row(cell: ScaleCell, spread: str) -> dict[str, str]:
    computed = ends = None
    if cell.forward_s is not None and cell.backward_s is not None:
        computed = cell.forward_s + cell.backward_s
    if cell.spread is not None and cell.spread[0] != cell.spread[1]:
        ends = "-".join(map(_seconds, cell.spread))
    return {
        "method": cell.method,
        "workers": str(cell.workers),
        "batch": str(cell.batch) + _OF_BATCH[cell.scaling],
        "kind": cell.kind,
        "epoch": "failed" if cell.error is not None else _seconds(cell.epoch_s),
        spread: ends or "",
        "compute": _seconds(computed),
        "exposed": _seconds(cell.exposed_s),
        "memory": "" if cell.memory_bytes is None else f"{cell.memory_bytes / 2**20:,.0f}",
    }


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


def remaining_s(expected_s: Iterable[float], ended: Sequence[tuple[float, float]]) -> float | None:
    """Estimate the remaining seconds; exactly 0 at the end, None before the first run ended.

    `ended`: expected and actual seconds of each finished run. Expected seconds may all be wrong by
    the same factor. Therefore the ratio of actual to expected seconds of the finished runs scales
    the expected seconds of the remaining runs.
    """
    if not ended:
        return None
    # Exact sums, so that nothing remains at the end.
    ended_s, taken_s = map(fsum, zip(*ended, strict=True))
    return max(0.0, fsum(expected_s) - ended_s) * taken_s / ended_s


class StudyProgress(Progress):
    """A progress bar with the remaining time; without a terminal, a line for each run."""

    def __init__(self, console: Console, expected_s: Sequence[float]) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._expected_s = expected_s
        self._ended: list[tuple[float, float]] = []
        self._task = self.add_task("", total=len(expected_s), left="")

    def begin(self, run: StudyRun) -> None:
        """Show the name of the run that begins."""
        self.update(self._task, description=run.label)

    def done(
        self, run: StudyRun, cells: Sequence[ScaleCell], expected_s: float, taken_s: float
    ) -> None:
        """Count a finished run."""
        self._ended.append((expected_s, taken_s))
        left_s, left = remaining_s(self._expected_s, self._ended), ""
        if left_s:
            whole = max(1, ceil(left_s))
            left = f"about {f'{whole} s' if whole < _FEW_S else duration(whole)} left"
        self.update(self._task, advance=1, left=left)
        if not self.console.is_terminal:
            first = cells[0]
            epoch = f"failed: {first.error}" if first.epoch_s is None else duration(first.epoch_s)
            line = f"{len(self._ended)}/{len(self._expected_s)}: {run.label}: {epoch}"
            self.console.print(f"{line}; {left}" if left else line, soft_wrap=True)
