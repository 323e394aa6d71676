"""The line beside the bar of a run: loss and throughput."""

import time
from typing import SupportsFloat

from paceline.exchange.session import Progress

_PERIOD_S = 0.5


class Status:
    """Advances the bar, and shows loss and throughput beside it, a few times a second."""

    def __init__(self, progress: Progress, tokens_per_sample: int | None) -> None:
        self._progress, self._tokens = progress, tokens_per_sample
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._since_s, self._num_samples = time.monotonic(), 0.0

    def add(self, num_samples: float, loss: SupportsFloat, advances: int = 1) -> None:
        """Count samples, and advance the bar; a GPU is waited for only if `loss` is shown now."""
        self._progress.advance(advances)
        self._num_samples += num_samples
        took_s = time.monotonic() - self._since_s
        if took_s < _PERIOD_S:
            return
        rate = self._num_samples / took_s
        tokens = f", {rate * self._tokens:,.0f} tokens/s" if self._tokens else ""
        self._progress.status(f"loss {float(loss):.4g}, {rate:,.0f} samples/s{tokens}")
        self.begin()
