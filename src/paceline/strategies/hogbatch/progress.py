"""How far a run is: its clock, its batches and workers so far, and what is shown beside the bar."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.exchange.session import TrainingSession
from paceline.strategies.hogbatch.statistics import BatchLog

_STATUS_S = 0.5


class PastWorker(NamedTuple):
    """A worker of the run before it was resumed with other ones."""

    name: str
    spec: str
    tried_samples_per_s: float | None


@dataclass(slots=True)
class History:
    """The batches of all epochs, the workers that ended before the run, and those before it.

    `lost` says why each ended; `past` are those of the run before it was resumed with others.
    """

    log: BatchLog = field(default_factory=BatchLog)
    lost: list[str] = field(default_factory=list)
    past: list[PastWorker] = field(default_factory=list)


class TrainingClock:
    """A clock of training, in nanoseconds, that stands still in pauses."""

    def __init__(self) -> None:
        self.trained_ns = self._epoch_began_ns = self._offset_ns = 0

    @property
    def epoch_ns(self) -> int:
        """The time since the epoch began."""
        return self.trained_ns - self._epoch_began_ns

    def begin_epoch(self) -> None:
        """Count an epoch from now."""
        self._epoch_began_ns = self.trained_ns

    def go_on(self) -> None:
        """Go on after a pause."""
        self._offset_ns = time.monotonic_ns() - self.trained_ns

    def stop(self) -> None:
        """Stand still."""
        self.trained_ns = self.at(time.monotonic_ns())

    def at(self, moment_ns: int) -> int:
        """Return the time of training at a moment of the monotonic clock."""
        return moment_ns - self._offset_ns

    def state(self) -> list[int]:
        """Return what the clock goes on from."""
        return [self.trained_ns, self._epoch_began_ns]

    def restore(self, state: list[int]) -> None:
        """Go on from such a state."""
        self.trained_ns, self._epoch_began_ns = state


class Status:
    """Counts samples on the bar, and shows loss and throughput beside it, a few times a second."""

    def __init__(self, session: TrainingSession, tokens_per_sample: int | None) -> None:
        self._progress, self._tokens = session.progress, tokens_per_sample
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._since_s, self._num_samples, self._loss_sum = time.monotonic(), 0, 0.0

    def add(self, num_samples: int, loss_sum: float) -> None:
        """Count a batch and the sum of its losses; show the mean of the latest if it is time."""
        self._progress.advance(num_samples)
        self._num_samples += num_samples
        self._loss_sum += loss_sum
        took_s = time.monotonic() - self._since_s
        if took_s < _STATUS_S:
            return
        rate, loss = self._num_samples / took_s, self._loss_sum / self._num_samples
        tokens = f", {rate * self._tokens:,.0f} tokens/s" if self._tokens else ""
        self._progress.status(f"loss {loss:.4g}, {rate:,.0f} samples/s{tokens}")
        self.begin()
