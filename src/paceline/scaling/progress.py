"""How far a study is: a bar in a terminal, and otherwise a line for each run."""

from collections.abc import Sequence
from math import ceil
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from paceline.report.format import duration
from paceline.scale_result import Cell
from paceline.scaling.remaining import Remaining
from paceline.scaling.runs import Run
from paceline.scaling.text import epoch_text

_FEW_S = 100  # which nobody needs in minutes


class StudyProgress:
    """Shows what is done of so many runs, and what is left by the runs that have ended."""

    def __init__(self, console: Console, expected_s: Sequence[float]) -> None:
        self._console = console
        self._remaining = Remaining(expected_s)
        self._total, self._done = len(expected_s), 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._total, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def begin(self, run: Run) -> None:
        """Say what is done now."""
        self._bar.update(self._task, description=run.label)

    def done(self, run: Run, cells: Sequence[Cell], expected_s: float, taken_s: float) -> None:
        """Count a run that has ended."""
        self._remaining.done(expected_s, taken_s)
        self._done += 1
        left = self._left()
        self._bar.update(self._task, advance=1, left=left)
        if not self._console.is_terminal:
            line = f"{self._done}/{self._total}: {run.label}: {epoch_text(cells)}"
            self._console.print(f"{line}; {left}" if left else line, soft_wrap=True)

    def _left(self) -> str:
        seconds = self._remaining.seconds
        if not seconds:
            return ""
        whole = max(1, ceil(seconds))
        return f"about {f'{whole} s' if whole < _FEW_S else duration(whole)} left"
