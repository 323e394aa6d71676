"""Bound the staleness: no worker begins a step too far ahead of the slowest live one."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.core.errors import InvalidInput


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

    All steps before `next_step` are applied, were lost with a server before, or were taken by the
    others while it was away. `below`: for a child hub, the next step of each of its workers.
    """

    next_step: int
    num_updates: int
    below: tuple[int, ...] = ()


@dataclass
class WorkerState(WorkerProgress):
    """A worker: whether it trains, and the step that is half done."""

    is_live: bool = False
    half: HeadGradients | None = None

    def complete(self, num_steps: int, below: tuple[int, ...] = ()) -> None:
        """Record the update that completed `num_steps` steps."""
        self.next_step = max(self.next_step, num_steps)
        self.num_updates, self.below = self.num_updates + 1, below


class Workers:
    """All workers of a run; none may be more than `staleness` steps ahead of another, if set."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        self.all = [WorkerState(0, 0) for _ in range(num_workers)]
        self._staleness = staleness

    @property
    def live(self) -> set[int]:
        """The numbers of the workers that train."""
        return {number for number, one in enumerate(self.all) if one.is_live}

    def __len__(self) -> int:
        return len(self.all)

    def next_step_of(self, worker: int) -> int:
        """Return the first step that a worker has not completed."""
        return self.of(worker).next_step

    def of(self, worker: int) -> WorkerState:
        """Return a worker by its number; InvalidInput if there is none."""
        if not 0 <= worker < len(self.all):
            raise InvalidInput(f"worker {worker}", f"there are {len(self.all)}, numbered from 0")
        return self.all[worker]

    def add(self, worker: int, step: int = 0) -> None:
        """Count on the worker, from its next step or a later one on."""
        own = self.of(worker)
        own.is_live, own.half, own.next_step = True, None, max(own.next_step, step)

    def drop(self, worker: int) -> None:
        """Count on the worker no longer, and drop what it has begun."""
        own = self.of(worker)
        own.is_live, own.half = False, None

    def may_begin(self, worker: int, step: int) -> bool:
        """Return True if no live worker is too far behind that step."""
        own = self.of(worker)
        if self._staleness is None:
            return True
        there = (one for one in self.all if one.is_live or one is own)
        slowest = min(one.next_step if one.half is None else one.half.step for one in there)
        return step - slowest <= self._staleness

    def progress(self) -> list[WorkerProgress]:
        """Return the progress of each worker, for a checkpoint."""
        return [WorkerProgress(one.next_step, one.num_updates, one.below) for one in self.all]

    def restore(self, progress: Sequence[WorkerProgress]) -> None:
        """Set the progress of each worker; nobody has joined yet."""
        self.all = [WorkerState(**asdict(one)) for one in progress]
