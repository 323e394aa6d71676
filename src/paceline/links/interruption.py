"""Stop a run between two steps after a signal, so that it can be resumed.

    rank 0   SIGINT ─► step 41 ends: "all stop after step 52" ─► store
    rank 1             step 42 ends: reads the store ─► stops after step 52

Rank 0 chooses a last step so late that every rank reads the store before that step. Each rank polls
the store at the end of a step, at most four times a second. Ranks are at most one step apart. If
only one rank got the signal, the error names that rank.
"""

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from torch.distributed.distributed_c10d import Store

from paceline.core.errors import Interrupted, WorkerLost
from paceline.links.group import Group
from paceline.links.signals import CommandHandler, handled_by, participle, pass_on

_KEY = "paceline/stop"  # store key; value: number of the last step, and the signal
# Store key; value: signal that a rank received. That rank also sets paceline/stop_asked/RANK.
_ASKED_KEY = "paceline/stop_asked"
_POLL_S = 0.25
_MARGIN_S = 1.0  # each rank polls the store at least once in this time
_MARGIN_STEPS = 2


class Interruption:
    """A signal handler that records the first signal as `number`.

    `worker`: name of the only worker that received a signal, if known. `before`: the previous
    handlers by signal number; they handle later signals. If None, later signals are ignored.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.worker: str | None = None
        self.before: dict[int, object] | None = None
        self._is_signalled = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the first signal; pass later signals on to the previous handlers, if set."""
        if self._is_signalled and self.before is not None:
            pass_on(self.before[number], number, frame)
        self._is_signalled = True
        self.number = self.number or number
        self.worker = None  # not only a worker got a signal: this process did, too
        for one in (self.before or {}).values():
            if isinstance(one, CommandHandler):
                one.received = one.received or number

    @property
    def requested(self) -> bool:
        """Whether a signal has requested that the run stops."""
        return self.number is not None

    def stopped(self, num_steps: int, more: str = "") -> Interrupted:
        """Return the error of a run that stopped after `num_steps`; `more` is added to the text."""
        assert self.number is not None
        by = "" if self.worker is None else f"by a signal to {self.worker}"
        words = filter(None, (participle(self.number), by, f"after step {num_steps:,}"))
        return Interrupted(" ".join(words) + more, num_steps, self.number)


_interruptible: list[Interruption] = []  # has an entry only while this process trains


@contextmanager
def interruptible(*, raises_again: bool = False) -> Iterator[Interruption]:
    """Record SIGINT and SIGTERM inside the block, so that they do not end the process.

    `raises_again`: record only the first signal, and pass later signals to the previous handlers.
    Outside the main thread, records no signals, because only the main thread can set handlers.
    """
    noted = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    with handled_by(noted) as before:
        noted.before = before if raises_again else None
        _interruptible.append(noted)
        try:
            yield noted
        except WorkerLost as error:
            if not (raises_again and noted.requested):
                raise
            assert noted.number is not None
            # Do not raise WorkerLost, because it would restart the run.
            raise Interrupted(f"{participle(noted.number)}; {error}", 0, noted.number) from error
        finally:
            _interruptible.pop()
            if noted.requested and not raises_again:
                # Do not restore the previous handlers: `noted` ignores a launcher's later signal.
                before.clear()


def stop_by_worker_signal(number: int, worker: str) -> None:
    """Stop the run after a signal to `worker`; if training has not begun, end the command."""
    if _interruptible:
        noted = _interruptible[-1]
        if not noted.requested:
            noted.number, noted.worker = number, worker
        return
    handler = signal.getsignal(number)
    if isinstance(handler, CommandHandler):
        handler.stop(number, f" by a signal to {worker}")
    raise WorkerLost(f"{worker} was ended by {signal.Signals(number).name}")


def is_agreed(store: Store) -> bool:
    """Return True if the ranks have agreed on a last step, after which they save their state."""
    return bool(store.check([_KEY]))


class StopAgreement:
    """Lets all ranks stop after the same step once a rank has received a signal."""

    def __init__(self, group: Group, interruption: Interruption, num_steps: int) -> None:
        self._group, self._interruption = group, interruption
        self._polled_s, self._polled = time.monotonic(), num_steps
        # Mean seconds per step in the fastest interval between two polls. The other intervals may
        # contain pauses of the store's process, during which steps wait.
        self._step_s = math.inf
        self._last: int | None = None
        self._agreed: int | None = None  # the signal that stops all ranks
        self._has_told = False

    def after(self, num_steps: int) -> bool:
        """Return True if all ranks stop after step `num_steps`, which has just ended."""
        now_s = time.monotonic()
        if now_s - self._polled_s >= _POLL_S:
            step_s = (now_s - self._polled_s) / max(1, num_steps - self._polled)
            self._step_s = min(self._step_s, step_s)
            self._poll(num_steps)
            self._polled_s, self._polled = time.monotonic(), num_steps
        elif self._group.world_size == 1 and self._interruption.requested:
            return True
        if self._last is None or num_steps < self._last:
            return False
        if self._agreed is not None:
            self._interruption.number = self._agreed
            self._name()
        return True

    def _poll(self, num_steps: int) -> None:
        store, asked = self._group.store, self._interruption.number
        if store is None:
            self._last = num_steps if asked is not None else None
            return
        if asked is not None and not self._has_told:
            self._has_told = True
            store.set(f"{_ASKED_KEY}/{self._group.rank}", str(asked))
            store.set(_ASKED_KEY, str(asked))
        if self._last is not None:
            return
        if self._group.rank == 0 and store.check([_ASKED_KEY]):
            number = int(store.get(_ASKED_KEY))
            self._last = num_steps + _MARGIN_STEPS + math.ceil(_MARGIN_S / self._step_s)
            store.set(_KEY, f"{self._last} {number}")
            self._agreed = number
        elif self._group.rank != 0 and store.check([_KEY]):
            self._last, self._agreed = map(int, store.get(_KEY).split())

    def _name(self) -> None:
        """Set the interruption's `worker` if only one rank received a signal."""
        store, group = self._group.store, self._group
        assert store is not None
        with suppress(RuntimeError):  # the store's process may have ended
            asked = [one for one in group.members if store.check([f"{_ASKED_KEY}/{one.rank}"])]
            if len(asked) == 1:
                self._interruption.worker = asked[0].title
