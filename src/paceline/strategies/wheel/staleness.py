"""Track the progress of all workers, and limit how far a worker may be ahead."""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field, FiniteFloat
from torch import Tensor

from paceline.rpc.value_checks import LARGEST_LOSS

MOST_EPOCHS = 10_000  # maximum number of epochs in the losses of one message
_MOST_SAMPLES = 2**53 - 1


@dataclass(frozen=True)
class LossSum:
    """The number of samples in one or more updates, and the sum of the samples' losses."""

    num_samples: Annotated[int, Field(ge=0, le=_MOST_SAMPLES)] = 0
    total: FiniteFloat = 0.0

    def __add__(self, other: "LossSum") -> "LossSum":
        """Add up to the limits of a message: a parent must accept sums with a liar's losses."""
        num_samples = min(self.num_samples + other.num_samples, _MOST_SAMPLES)
        most = LARGEST_LOSS * max(1, num_samples)
        return LossSum(num_samples, max(-most, min(self.total + other.total, most)))

    @property
    def mean(self) -> float:
        """The mean loss of a sample; `total` without samples."""
        return self.total / max(1, self.num_samples)


class HeadGradients(NamedTuple):
    """Holds gradients and loss of the last layers until the first layers' gradients arrive."""

    step: int
    version: int
    gradients: list[Tensor]
    loss: LossSum = LossSum()


@dataclass
class WorkerProgress:
    """A worker's progress, as a checkpoint stores it.

    `next_step`: the first step that is neither completed nor skipped. A worker that returns skips
    the steps that other workers completed in the meantime. `below`: for a child hub, the next step
    of each of its workers.
    """

    next_step: int
    num_updates: int
    below: tuple[int, ...] = ()


@dataclass
class WorkerState(WorkerProgress):
    """The state of a worker: its progress, whether it trains or is done, and a half-done step."""

    is_live: bool = False
    is_done: bool = False
    half: HeadGradients | None = None

    def complete(self, num_steps: int, below: tuple[int, ...] = ()) -> None:
        """Record an update, after which the worker has completed `num_steps` steps."""
        self.next_step = max(self.next_step, num_steps)
        self.num_updates, self.below = self.num_updates + 1, below


class Workers:
    """All workers of a run; `staleness`: the most steps a worker may be ahead of the slowest."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        self.all = [WorkerState(0, 0) for _ in range(num_workers)]
        self._staleness = staleness

    @property
    def live(self) -> set[int]:
        """The numbers of the workers that train."""
        return {number for number, one in enumerate(self.all) if one.is_live}

    @property
    def completed(self) -> int:
        """The number of steps that every training or finished worker has completed."""
        there = [one.next_step for one in self.all if one.is_live or one.is_done]
        return min(there, default=0)

    @property
    def first(self) -> int | None:
        """The training worker with the lowest number, if any; the hub copies its model buffers."""
        return min(self.live, default=None)

    @property
    def done(self) -> set[int]:
        """The numbers of the workers that have completed all their steps."""
        return {number for number, one in enumerate(self.all) if one.is_done}

    @property
    def next_steps(self) -> list[int]:
        """The next step of each worker, in the order of workers."""
        return [one.next_step for one in self.all]

    def of(self, worker: int) -> WorkerState:
        """Return the state of a worker; `paceline.rpc` admits only workers of the run."""
        return self.all[worker]

    def add(self, worker: int, step: int = 0) -> None:
        """Mark a worker as training; its next step becomes at least `step`."""
        own = self.of(worker)
        own.is_live, own.half, own.next_step = True, None, max(own.next_step, step)

    def drop(self, worker: int) -> None:
        """Mark a worker lost, and drop its half-done step."""
        own = self.of(worker)
        own.is_live, own.half = False, None

    def may_begin(self, worker: int, step: int) -> bool:
        """Return whether the slowest live worker is at most `staleness` steps behind `step`."""
        own = self.of(worker)
        if self._staleness is None:
            return True
        there = (one for one in self.all if one.is_live or one is own)
        slowest = min(one.next_step if one.half is None else one.half.step for one in there)
        return step - slowest <= self._staleness
