"""Show the progress of a run: a bar, a line for each epoch, TensorBoard scalars."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Evaluation
from paceline.exchange.session import Progress
from paceline.report.terminal import epoch_line, tested

_LINE_EVERY_S = 10.0  # seconds between status lines without a terminal
logger = logging.getLogger(__name__)


def require_tensorboard() -> None:
    """Raise InvalidInput if the TensorBoard extra is not installed."""
    if find_spec("tensorboard") is None:
        hint = "pip install 'paceline[tensorboard]'"
        raise InvalidInput("tensorboard", "is not installed", hint=hint)


class Scalars:
    """A TensorBoard event file with scalars of each epoch; the first epoch has number 1.

    Call `close` after use.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional dependency

        self._writer = SummaryWriter(str(folder))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()

    def epoch(self, epoch: Epoch, num_samples: float | None, score: str) -> None:
        """Add an epoch's losses and score, and the throughput if `num_samples` is known."""
        values = {
            "loss/train": epoch.train_loss,
            "loss/test": epoch.test_loss,
            f"{score}/test": epoch.score,
            "throughput/samples_per_s": num_samples and num_samples / epoch.seconds,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, epoch.number + 1)
        self._writer.flush()

    def step(self, number: int, seconds: Mapping[str, float]) -> None:
        """Add the seconds of each part of a typical step, such as "forward"."""
        for quantity, value in seconds.items():
            self._writer.add_scalar(f"step/{quantity}_s", value, number + 1)


class TerminalProgress(Progress):
    """Shows a run's progress on a console, and writes scalars to `board` unless `board` is None."""

    def __init__(
        self, err: Console, doing: str, num_epochs: int | None = 1, board: Scalars | None = None
    ) -> None:
        self._num_epochs, self.board = num_epochs, board
        self._num_samples: float | None = None  # per epoch, if known
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
        """Remove the bar, and flush the scalars."""
        self._bar.stop()
        if self.board is not None:
            self.board.close()

    @contextmanager
    def measuring(self, seconds: float) -> Iterator[None]:
        """Show a bar during the given seconds of profiling before the run."""
        self._bar.update(self._task, doing="measuring", description=f"about {seconds:g} s")
        self._bar.start()
        try:
            yield
        finally:
            self._bar.stop()  # otherwise tables on standard output would overwrite the bar

    def begin(self, total: int, unit: str) -> None:
        """Start to count up to the given number of steps or samples."""
        each = self.samples_per_step if unit == "steps" else 1.0
        if self._num_epochs is not None:
            self._num_samples = total * each / self._num_epochs
        self._bar.update(self._task, total=total, description="", unit=unit, doing=self._doing)
        self._bar.start()

    def advance(self, count: int = 1) -> None:
        """Count steps or samples."""
        if self._is_shown:  # without a terminal, even the bar's lock would cost too much
            self._bar.advance(self._task, count)

    def epoch(self, epoch: Epoch, score: str) -> None:
        """Report a finished epoch."""
        logger.info("%s", epoch_line(epoch, self._num_epochs, score))
        if self.board is not None:
            self.board.epoch(epoch, self._num_samples, score)

    def evaluation(self, found: Evaluation, score: str) -> None:
        """Report a test within an epoch."""
        shown = tested(found.test_loss, found.score, score)
        logger.info("step %d%s", found.num_steps, shown)

    def status(self, text: str) -> None:
        """Show the throughput: next to the bar or, without a terminal, at intervals."""
        self._bar.update(self._task, description=text)
        if not self._is_shown and time.monotonic() - self._said_s > _LINE_EVERY_S:
            self._said_s = time.monotonic()
            logger.info("%s", text)
