"""Show the progress of a run: a bar, a line for each epoch, TensorBoard scalars."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation
from paceline.exchange.session import Progress
from paceline.report.terminal import epoch_line, tested

_LINE_EVERY_S = 10.0  # seconds between status lines if there is no terminal
logger = logging.getLogger(__name__)


def require_tensorboard() -> None:
    """Raise InvalidInput if the TensorBoard extra is not installed."""
    if find_spec("tensorboard") is None:
        hint = "pip install 'paceline[tensorboard]'"
        raise InvalidInput("tensorboard", "is not installed", hint=hint)


class TerminalProgress(Progress):
    """Shows a run's progress on a console, and writes scalars for TensorBoard.

    `doing`: text before the bar, such as "training". `num_epochs`: None if unknown. `scalars`:
    folder of the TensorBoard event file; None writes no scalars.
    """

    def __init__(
        self, err: Console, doing: str, num_epochs: int | None = 1, scalars: Path | None = None
    ) -> None:
        self._num_epochs = num_epochs
        self._board: Any = None
        if scalars is not None:
            from torch.utils.tensorboard import SummaryWriter  # optional dependency

            self._board = SummaryWriter(str(scalars))
        self._num_samples: float | None = None  # samples per epoch, if known
        self.samples_per_step = 1.0
        self._doing = doing
        self._bar = Bar(
            TextColumn("{task.fields[doing]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]} {task.description}"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, unit="", doing=doing)
        self._is_shown = err.is_terminal and not err.quiet
        self._said_s = time.monotonic()

    def close(self) -> None:
        """Remove the bar, and close the TensorBoard file."""
        self._bar.stop()
        if self._board is not None:
            self._board.close()

    @contextmanager
    def measuring(self, seconds: float) -> Iterator[None]:
        """Show a bar while the caller profiles; `seconds`: about how long that takes."""
        self._bar.update(self._task, doing="measuring", description=f"about {seconds:g} s")
        self._bar.start()
        try:
            yield
        finally:
            self._bar.stop()  # otherwise tables on standard output would overwrite the bar

    def begin(self, total: int, unit: str) -> None:
        """Show a bar for `total` steps or samples; `unit` is "steps" or "samples"."""
        each = self.samples_per_step if unit == "steps" else 1.0
        if self._num_epochs is not None:
            self._num_samples = total * each / self._num_epochs
        self._bar.update(self._task, total=total, description="", unit=unit, doing=self._doing)
        self._bar.start()

    def advance(self, count: int = 1) -> None:
        """Advance the bar by `count` finished steps or samples."""
        if self._is_shown:  # without a terminal, even the bar's lock would cost too much
            self._bar.advance(self._task, count)

    def epoch(self, epoch: Epoch, score: str) -> None:
        """Log a finished epoch, and write its TensorBoard scalars; `score`: the metric's name."""
        logger.info("%s", epoch_line(epoch, self._num_epochs, score))
        if self._board is None:
            return
        rate = self._num_samples and self._num_samples / epoch.seconds
        losses = {"loss/train": epoch.train_loss, "loss/test": epoch.test_loss}
        scores = {f"{score}/test": epoch.score, "throughput/samples_per_s": rate}
        for name, value in (losses | scores).items():
            if value is not None:
                self._board.add_scalar(name, value, epoch.number + 1)
        self._board.flush()

    def evaluation(self, found: Evaluation, score: str) -> None:
        """Log an evaluation within an epoch: the test loss, and the metric named `score`."""
        shown = tested(found.test_loss, found.score, score)
        logger.info("step %d%s", found.num_steps, shown)

    def status(self, text: str) -> None:
        """Show the throughput (`text`) next to the bar; without a terminal, log it."""
        self._bar.update(self._task, description=text)
        if not self._is_shown and time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            logger.info("%s", text)
