"""How far a run is: what is counted of it, what is shown beside the bar, and when it pauses."""

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from paceline.exchange.session import TrainingSession

_STATUS_S = 0.5


class Pauses(Protocol):
    """Asks for pauses between batches, and uses them, as for checkpoints."""

    def is_due(self, num_samples: int) -> bool:
        """Return True for a pause now, after so many samples of the run; asked very often."""

    def use(self) -> None:
        """Do something while no worker works. If this raises, the training is over."""


class PastWorker(NamedTuple):
    """A worker of the run before it was resumed with other ones."""

    name: str
    spec: str
    tried_samples_per_s: float | None


@dataclass(slots=True)
class Counts:
    """What a run has counted so far, on a clock of training that stands still in pauses.

    `loss_sum` is that of the epoch's samples, of which `num_reported` came with their loss.
    """

    epoch: int = 0
    loss_sum: float = 0.0
    num_reported: int = 0
    num_batches: int = 0
    num_updates: int = 0
    trained_ns: int = 0
    epoch_began_ns: int = 0


class Status:
    """Shows the loss and the throughput beside the bar, a few times a second."""

    def __init__(self, session: TrainingSession, tokens_per_sample: int | None) -> None:
        self._progress, self._tokens = session.progress, tokens_per_sample
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._since_s, self._num_samples, self._loss_sum = time.monotonic(), 0, 0.0

    def add(self, num_samples: int, loss_sum: float) -> None:
        """Count a batch and the sum of its losses; show the mean of the latest if it is time."""
        self._num_samples += num_samples
        self._loss_sum += loss_sum
        took_s = time.monotonic() - self._since_s
        if took_s < _STATUS_S:
            return
        rate, loss = self._num_samples / took_s, self._loss_sum / self._num_samples
        tokens = f", {rate * self._tokens:,.0f} tokens/s" if self._tokens else ""
        self._progress.status(f"loss {loss:.4g}, {rate:,.0f} samples/s{tokens}")
        self.begin()
