"""What a hub shows while it serves: one line in a terminal, and now and then one elsewhere."""

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from paceline.report.format import nbytes, number
from paceline.strategies.wheel.tally import Status

_WINDOW_S = 10.0
_LINE_EVERY_S = 10.0


class Live:
    """Shows throughput, staleness and bytes of a run of so many samples."""

    def __init__(self, err: Console, num_samples: int, doing: str = "training") -> None:
        self._err = err
        columns = (TextColumn(doing), BarColumn(), TextColumn("{task.description}"))
        self._progress = Progress(
            *columns, console=err, transient=True, disable=not err.is_terminal
        )
        self._task = self._progress.add_task("waiting for workers", total=num_samples)
        self._recent: deque[Status] = deque()
        self._said_s = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def look(self, status: Status) -> None:
        """Show how far the run is."""
        if not status.version:
            return
        recent = self._recent
        recent.append(status)
        while status.trained_s - recent[0].trained_s > _WINDOW_S and len(recent) > 2:
            recent.popleft()
        text = _text(recent[0], status)
        self._progress.update(self._task, completed=status.num_samples, description=text)
        if not self._err.is_terminal and time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            self._err.print(f"update {status.version:,}: {text}", soft_wrap=True)


def _text(first: Status, last: Status) -> str:
    seconds = max(last.trained_s - first.trained_s, 1e-9)
    rate = (last.num_samples - first.num_samples) / seconds
    traffic = (last.nbytes - first.nbytes) / seconds
    return (
        f"{number(rate)} samples/s, {len(last.live)} workers, staleness "
        f"{last.mean_staleness:.1f}, {nbytes(traffic)}/s, {nbytes(last.nbytes)} so far"
    )
