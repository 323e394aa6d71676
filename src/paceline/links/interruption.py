"""Ctrl-C: the first one asks a run to stop between two steps, so that it can be gone on with.

    rank 0   SIGINT ─► step 41 is over: "all stop after step 52" ─► store
    rank 1             step 42 is over: looks into the store ─► stops after step 52

Ranks are never more than a step apart, and each looks a few times a second, or once a step.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.links.group import Group

_KEY = "paceline/stop"
_POLL_S = 0.25
_MARGIN_S = 1.0  # in which each rank looks at least once
_MARGIN_STEPS = 2


class Interruption:
    """Whether the run was asked to stop."""

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def interruptible(*, raises_again: bool = False) -> Iterator[Interruption]:
    """Note a SIGINT, instead of raising KeyboardInterrupt; by `raises_again` only the first one.

    Only the main thread may handle signals: in any other one nothing is noted.
    """
    noted = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return

    def note(number: int, _: object) -> None:
        if noted.requested and raises_again:
            raise KeyboardInterrupt
        noted.requested = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


class StopAgreement:
    """Agrees between ranks after which step all stop, once rank 0 was asked to.

    `after(num_steps)` is called after each step, with the steps of the run so far.
    """

    def __init__(self, group: Group, interruption: Interruption, num_steps: int) -> None:
        self._group, self._interruption = group, interruption
        self._began_s = self._polled_s = time.monotonic()
        self._first = num_steps
        self._last: int | None = None

    def after(self, num_steps: int) -> bool:
        """Return True if this step is the one after which all ranks stop."""
        now_s = time.monotonic()
        if self._last is None and now_s - self._polled_s >= _POLL_S:
            self._polled_s = now_s
            self._poll(num_steps, (now_s - self._began_s) / max(1, num_steps - self._first))
        elif self._group.world_size == 1 and self._interruption.requested:
            return True
        return self._last is not None and num_steps >= self._last

    def _poll(self, num_steps: int, step_s: float) -> None:
        store, is_first = self._group.store, self._group.rank == 0
        if store is None:
            self._last = num_steps if self._interruption.requested else None
        elif is_first and self._interruption.requested:
            self._last = num_steps + _MARGIN_STEPS + math.ceil(_MARGIN_S / max(step_s, 1e-6))
            store.set(_KEY, str(self._last))
        elif not is_first and store.check([_KEY]):
            self._last = int(store.get(_KEY))
