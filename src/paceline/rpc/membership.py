"""Track who takes part in a run: workers wait for its beginning, train, are lost and come back."""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from paceline.core.errors import WorkerLost

logger = logging.getLogger(__name__)


class Workers(Protocol):
    """The workers of a run, by their numbers from 0 up, and how far each is."""

    @property
    def live(self) -> set[int]:
        """The numbers of the workers that train."""

    def __len__(self) -> int:
        """Return the number of all workers."""

    def next_step_of(self, worker: int) -> int:
        """Return the first step that a worker has not completed."""

    def add(self, worker: int, step: int) -> None:
        """Count on the worker, from that step on."""

    def drop(self, worker: int) -> None:
        """Count on the worker no longer."""


class Membership:
    """The processes that take part in a run, as its hub knows them.

    `admit` is called with a worker and the step with which it begins. Training may begin when all
    are there, or those who are after `wait_s`; who comes later begins at once.
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
        self._waiting: dict[int, int] = {}  # workers that wait to begin, with the step they are at
        self._returning: set[int] = set()  # those who were told to begin again
        self._last_words = "all workers have ended"
        self._seen_s = self._clock()  # when somebody was there
        self.has_begun = False
        self.done: set[int] = set()

    @property
    def _is_anybody_there(self) -> bool:
        return bool(self._workers.live or self._returning or self._waiting)

    @property
    def _is_late(self) -> bool:
        return self._clock() - self._seen_s > self._wait_s

    @property
    def _missing(self) -> set[int]:
        return self._expected - self.done - self._waiting.keys()

    @property
    def is_over(self) -> bool:
        """True if all who were there to the end are done."""
        return bool(self.done) and not self._is_anybody_there

    @property
    def is_ready(self) -> bool:
        """True if training can begin; WorkerLost if nobody is left, or came within `wait_s`."""
        self._check_anybody_is_left()
        if self._missing and not self._is_late:
            return False
        if not self._waiting:
            raise WorkerLost(f"no worker has come within {self._wait_s:g} s")
        return True

    @property
    def num_steps(self) -> int:
        """The number of steps that all who train, or are done, have completed."""
        there = self._workers.live | self.done
        return min((self._workers.next_step_of(worker) for worker in there), default=0)

    def begin(self) -> None:
        """Begin the training with those who are there."""
        if self._missing:
            logger.info("training begins without workers %s", sorted(self._missing))
        self.has_begun, self._seen_s = True, self._clock()
        self._admit_waiting()

    def wait(self, worker: int, step: int) -> None:
        """Have a worker at that step wait until it may begin, alone or with the others."""
        self._returning.discard(worker)
        self._waiting[worker] = step
        if self.has_begun and not self._returning:
            self._admit_waiting()

    def finish(self, worker: int) -> None:
        """Record that a worker has completed all its steps."""
        self.done.add(worker)
        self._workers.drop(worker)

    def drop(self, worker: int) -> bool:
        """Record that a worker is away; return True if it was training."""
        self._waiting.pop(worker, None)
        was_there = worker in self._workers.live | self._returning
        self._returning.discard(worker)
        self._workers.drop(worker)
        return was_there

    def mark_dead(self, worker: int, why: str) -> None:
        """Record that a worker's process has ended: it will never be back."""
        self._expected.discard(worker)
        if worker not in self.done:
            self._last_words = f"worker {worker} {why}"

    def restart(self) -> None:
        """Have all that train begin again, together: what they have begun is void."""
        self._returning |= self._workers.live
        for worker in self._workers.live:
            self._workers.drop(worker)

    def poll(self) -> None:
        """Admit those who wait; WorkerLost if no worker is left, or none was there for `wait_s`."""
        self._check_anybody_is_left()
        if self._is_anybody_there:
            self._seen_s = self._clock()
            if not self._returning:
                self._admit_waiting()
        elif self._is_late:
            raise WorkerLost(f"no worker is left, and none came back in {self._wait_s:g} s")

    def _check_anybody_is_left(self) -> None:
        if not self._expected - self.done and not self.done:
            raise WorkerLost(f"{self._last_words}: no worker is left")

    def _admit_waiting(self) -> None:
        """Let those who wait begin, each with its next step."""
        others = [self._workers.next_step_of(worker) for worker in self._workers.live]
        for worker, at in sorted(self._waiting.items()):
            own = self._workers.next_step_of(worker)
            # Steps that others made while it was away are not made up for: all would wait for it.
            step = max(own, min(others, default=own))
            self._workers.add(worker, step)
            if at > step:
                logger.info(
                    "worker %d was at step %d, and this hub knows of %d steps: %d are done again",
                    *(worker, at, step, at - step),
                )
            elif step > own:
                logger.info("worker %d goes on with the others, at step %d", worker, step)
            self._admit(worker, step)
        self._waiting.clear()
