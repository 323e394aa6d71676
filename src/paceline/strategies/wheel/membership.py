"""Track the workers of a run: how far each is, who may begin a step, who is there.

`Workers` belongs to the parameter server and bounds the staleness: no worker begins a step too far
ahead of the slowest live one. `Membership` belongs to the hub: workers wait for the beginning,
train, are lost, come back, and end.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.core.errors import InvalidInput, WorkerLost

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LossSum:
    """The samples of one or more updates, and the sum of their losses."""

    num_samples: int = 0
    total: float = 0.0

    def __add__(self, other: "LossSum") -> "LossSum":
        return LossSum(self.num_samples + other.num_samples, self.total + other.total)


class HeadGradients(NamedTuple):
    """The head's gradients of a step, which wait for the body's, and its loss."""

    step: int
    version: int
    gradients: list[Tensor]
    loss: LossSum = LossSum()


@dataclass
class WorkerProgress:
    """The part of a worker that checkpoints hold.

    All steps before `next_step` are applied, or were lost with a server before; the last of
    `num_updates` made `version`. `below`: for a child hub, the next step of each of its workers.
    """

    next_step: int
    num_updates: int
    version: int
    below: tuple[int, ...] = ()


@dataclass
class WorkerState(WorkerProgress):
    """A worker: `asked` is the step whose parameters it fetched last, `half` one half done."""

    asked: int = 0
    is_live: bool = False
    half: HeadGradients | None = None

    def complete(self, num_steps: int, version: int, below: tuple[int, ...] = ()) -> None:
        """Record the update that completed `num_steps` steps, and made this version."""
        self.next_step = max(self.next_step, num_steps)
        self.num_updates, self.version, self.below = self.num_updates + 1, version, below


class Workers:
    """All workers of a run; none may be more than `staleness` steps ahead of another, if set."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        if num_workers < 1:
            raise InvalidInput("workers", str(num_workers), hint="there must be at least 1")
        if staleness is not None and staleness < 0:
            raise InvalidInput("staleness", f"{staleness} steps", hint="a bound is 0 or more")
        self.all = [WorkerState(0, 0, 0) for _ in range(num_workers)]
        self._staleness = staleness

    @property
    def live(self) -> set[int]:
        """The numbers of the workers that train."""
        return {number for number, one in enumerate(self.all) if one.is_live}

    def of(self, worker: int) -> WorkerState:
        """Return a worker by its number; InvalidInput if there is none."""
        if not 0 <= worker < len(self.all):
            raise InvalidInput(f"worker {worker}", f"there are {len(self.all)}, numbered from 0")
        return self.all[worker]

    def add(self, worker: int) -> None:
        """Count on the worker; whatever it had begun, it begins again."""
        own = self.of(worker)
        own.is_live, own.half, own.asked = True, None, own.next_step

    def drop(self, worker: int) -> None:
        """Count on the worker no longer, and drop what it has begun."""
        own = self.of(worker)
        own.is_live, own.half = False, None

    def may_begin(self, worker: int, step: int) -> bool:
        """Return True if no live worker is too far behind that step."""
        own = self.of(worker)
        own.asked = step
        if self._staleness is None:
            return True
        # A worker that asks for a step has nothing open before it, unless it has a half. After a
        # restart from a checkpoint that is more than this server has applied.
        slowest = min(
            one.half.step if one.half is not None else max(one.next_step, one.asked)
            for one in self.all
            if one.is_live or one is own
        )
        return step - slowest <= self._staleness

    def progress(self) -> list[WorkerProgress]:
        """Return the progress of each worker, for a checkpoint."""
        return [
            WorkerProgress(one.next_step, one.num_updates, one.version, one.below)
            for one in self.all
        ]

    def restore(self, progress: Sequence[WorkerProgress]) -> None:
        """Set the progress of each worker; nobody has joined yet."""
        self.all = [WorkerState(**asdict(one), asked=one.next_step) for one in progress]


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
        self._expected = set(range(len(workers.all)))
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
        return min((self._workers.of(worker).next_step for worker in there), default=0)

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
        was_there = self._workers.of(worker).is_live or worker in self._returning
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
        others = [self._workers.of(worker).next_step for worker in self._workers.live]
        for worker, at in sorted(self._waiting.items()):
            own = self._workers.of(worker).next_step
            # Steps that others made while it was away are not made up for: all would wait for it.
            step = max(own, min(others, default=own))
            self._workers.add(worker)
            if at > step:
                logger.info(
                    "worker %d was at step %d, and this hub knows of %d steps: %d are done again",
                    *(worker, at, step, at - step),
                )
            elif step > own:
                logger.info("worker %d goes on with the others, at step %d", worker, step)
            self._admit(worker, step)
        self._waiting.clear()
