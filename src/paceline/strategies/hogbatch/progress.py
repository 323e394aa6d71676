"""How far a run is: its batches and workers so far, and what is shown beside the bar."""

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
