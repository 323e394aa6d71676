"""Track which workers of a run wait, train, are lost, are done, or are late."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

from paceline.core.errors import WorkerLost

logger = logging.getLogger(__name__)

_KEPT = 32  # most recorded times of a worker, each from a reply to the next request
_TIMES = 20.0  # a worker may take this multiple of its median time
_TIMES_AT_FIRST = 10.0  # a worker's first request may take this multiple of `deadline_s`


class Workers(Protocol):
    """The workers of a run, numbered from 0, and the progress of each."""

    @property
    def live(self) -> set[int]:
        """The numbers of the workers that are training."""

    def __len__(self) -> int:
        """Return the number of all workers."""

    def next_step_of(self, worker: int) -> int:
        """Return a worker's first incomplete step."""

    def add(self, worker: int, step: int) -> None:
        """Mark the worker as training; its results from this step on are expected."""

    def drop(self, worker: int) -> None:
        """Expect no more results of the worker."""


class Membership:
    """The hub's record of the worker processes in a run.

    Training begins when all workers have joined, or after `wait_s` without the missing workers.
    Workers that join later begin at once. `admit(worker, step)` lets a worker begin.
    """

    def __init__(
        self,
        workers: Workers,
        wait_s: float,
        admit: Callable[[int, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers, self._wait_s, self._admit, self._clock = workers, wait_s, admit, clock
        self._expected = set(range(len(workers)))
        self._waiting: dict[int, int] = {}  # current step of each worker that waits to begin
        self._returning: set[int] = set()  # workers that were asked to restart the step
        self._last_end = "all workers have ended"
        self._present_s = self._clock()  # the last time a worker was present
        self.has_begun = False
        self.done: set[int] = set()

    @property
    def _is_any_present(self) -> bool:
        return bool(self._workers.live or self._returning or self._waiting)

    @property
    def _is_late(self) -> bool:
        return self._clock() - self._present_s > self._wait_s

    @property
    def _missing(self) -> set[int]:
        return self._expected - self.done - self._waiting.keys()

    @property
    def is_over(self) -> bool:
        """True once some worker is done and no worker trains, returns or waits."""
        return bool(self.done) and not self._is_any_present

    @property
    def is_ready(self) -> bool:
        """True if training can begin.

        Raises WorkerLost if no worker is left, or if no worker has joined within `wait_s`.
        """
        self._check_any_is_left()
        if self._missing and not self._is_late:
            return False
        if not self._waiting:
            raise WorkerLost(f"no worker has joined within {self._wait_s:g} s")
        return True

    @property
    def num_steps(self) -> int:
        """The number of steps that every training or finished worker has completed."""
        present = self._workers.live | self.done
        return min((self._workers.next_step_of(worker) for worker in present), default=0)

    def begin(self) -> None:
        """Begin training with the workers that wait."""
        if self._missing:
            logger.info("training begins without workers %s", sorted(self._missing))
        self.has_begun, self._present_s = True, self._clock()
        self._admit_waiting()

    def wait(self, worker: int, step: int) -> None:
        """Let a worker, which is at `step`, wait until it may begin."""
        self._returning.discard(worker)
        self._waiting[worker] = step
        if self.has_begun and not self._returning:
            self._admit_waiting()

    def finish(self, worker: int) -> None:
        """Record that a worker has completed all its steps."""
        self.done.add(worker)
        self._workers.drop(worker)

    def drop(self, worker: int) -> bool:
        """Record that a worker is gone; return True if it was training."""
        self._waiting.pop(worker, None)
        was_training = worker in self._workers.live | self._returning
        self._returning.discard(worker)
        self._workers.drop(worker)
        return was_training

    def mark_dead(self, worker: int, why: str) -> None:
        """Record that a worker's process has ended, so that it cannot return."""
        self._expected.discard(worker)
        if worker not in self.done:
            self._last_end = f"worker {worker} {why}"

    def restart(self) -> None:
        """Let all training workers begin their step again, together.

        The results of this step are void.
        """
        self._returning |= self._workers.live
        for worker in self._workers.live:
            self._workers.drop(worker)

    def poll(self) -> None:
        """Let waiting workers begin.

        Raises WorkerLost if no worker is left, or if no worker was present for `wait_s`.
        """
        self._check_any_is_left()
        if self._is_any_present:
            self._present_s = self._clock()
            if not self._returning:
                self._admit_waiting()
        elif self._is_late:
            raise WorkerLost(
                f"all workers are lost, and no worker returned within {self._wait_s:g} s"
            )

    def _check_any_is_left(self) -> None:
        if not self._expected - self.done and not self.done:
            raise WorkerLost(f"{self._last_end}: no worker is left")

    def _admit_waiting(self) -> None:
        """Let all waiting workers begin, each at its next step."""
        others = [self._workers.next_step_of(worker) for worker in self._workers.live]
        for worker, at in sorted(self._waiting.items()):
            own = self._workers.next_step_of(worker)
            # A returning worker skips steps that all training workers have completed: repeating
            # these steps would delay everyone.
            step = max(own, min(others, default=own))
            self._workers.add(worker, step)
            if at > step:
                logger.info(
                    "worker %d was at step %d, this hub at step %d: %d steps are repeated",
                    *(worker, at, step, at - step),
                )
            elif step > own:
                logger.info("worker %d continues with the others, at step %d", worker, step)
            self._admit(worker, step)
        self._waiting.clear()


class ProgressDeadline:
    """Limits the time from a reply to a worker until the worker's next request.

    The limit is a multiple of the worker's median time, but at least `deadline_s`. Time during
    which a request waits for other workers does not count.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s, self._clock = deadline_s, clock
        self._since_s: dict[int, float] = {}
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def replied(self, worker: int) -> None:
        """Record that the hub has replied to a worker."""
        self._since_s[worker] = self._clock()

    def requested(self, worker: int) -> None:
        """Record that a worker's request has arrived."""
        since_s = self._since_s.pop(worker, None)
        if since_s is not None:
            self._took_s[worker].append(self._clock() - since_s)

    def forget(self, worker: int) -> None:
        """Expect no request from the worker."""
        self._since_s.pop(worker, None)

    def paused(self, seconds: float) -> None:
        """Exclude a pause of the hub from the times of all workers."""
        self._since_s = {worker: one + seconds for worker, one in self._since_s.items()}

    def overdue(self) -> dict[int, float]:
        """Return the seconds since the hub's last reply, for each late worker."""
        now_s = self._clock()
        late = {worker: now_s - since_s for worker, since_s in self._since_s.items()}
        return {worker: one for worker, one in late.items() if one > self._allowed_s(worker)}

    def _allowed_s(self, worker: int) -> float:
        took = self._took_s[worker]
        if not took:
            return _TIMES_AT_FIRST * self._deadline_s
        return max(self._deadline_s, _TIMES * median(took))
