"""How far each body worker is, as the parameter server knows it, and who has to wait for whom."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.core.errors import InvalidInput


class Half(NamedTuple):
    """The head's gradients of a step, which wait for the body's."""

    step: int
    version: int
    gradients: list[Tensor]


class Progress(NamedTuple):
    """What is kept of a worker: its next step, its updates, and the version its last one made.

    Of a child hub `below` has the next step of each of its workers.
    """

    next_step: int
    num_updates: int
    version: int
    below: tuple[int, ...] = ()


@dataclass
class Worker:
    """A worker: all steps before `next_step` are applied, or were lost with a server before."""

    next_step: int = 0
    num_updates: int = 0
    version: int = 0
    below: tuple[int, ...] = ()
    asked: int = 0
    is_live: bool = False
    half: Half | None = None

    def completed(self, step: int, version: int) -> None:
        """Note that the step was applied and made this version."""
        self.next_step, self.version = step + 1, version
        self.num_updates += 1

    def gathered(self, step: int, version: int, below: tuple[int, ...]) -> None:
        """Note an update of a child hub, whose workers have all done `step` steps."""
        self.next_step, self.version, self.below = max(self.next_step, step), version, below
        self.num_updates += 1

    @property
    def reached(self) -> int:
        """The number of steps that are behind it, as others have to wait for them.

        A worker that asks for a step has nothing open before it, unless a half says so. After a
        restart from a snapshot that is more than this server has applied.
        """
        if self.half is not None:
            return self.half.step
        return max(self.next_step, self.asked)


class Workers:
    """All workers of a run, and the bound on how far one may be ahead of another, if any."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        if num_workers < 1:
            raise InvalidInput(f"workers: {num_workers}; there must be at least 1")
        if staleness is not None and staleness < 0:
            raise InvalidInput(f"staleness: {staleness} steps; a bound is 0 or more")
        self.all = [Worker() for _ in range(num_workers)]
        self._staleness = staleness

    def of(self, worker: int) -> Worker:
        """Return a worker by its number; InvalidInput if there is none."""
        if not 0 <= worker < len(self.all):
            raise InvalidInput(f"worker {worker}: there are {len(self.all)}, numbered from 0")
        return self.all[worker]

    def joined(self, worker: int) -> None:
        """Count on the worker; whatever it had begun, it begins again."""
        own = self.of(worker)
        own.is_live, own.half, own.asked = True, None, own.next_step

    def lost(self, worker: int) -> None:
        """Count on the worker no longer, and drop what it has begun."""
        own = self.of(worker)
        own.is_live, own.half = False, None

    def may_begin(self, worker: int, step: int) -> bool:
        """Return whether no live worker is too far behind that step."""
        own = self.of(worker)
        own.asked = step
        if self._staleness is None:
            return True
        slowest = min(one.reached for one in self.all if one.is_live or one is own)
        return step - slowest <= self._staleness

    def applied(self, worker: int, step: int) -> int | None:
        """Return the version that a step made, or None if it has not been applied.

        InvalidInput for an older step than a worker can have begun, or a negative one.
        """
        own = self.of(worker)
        if step >= own.next_step:
            return None
        if step < 0 or step != own.next_step - 1:
            raise InvalidInput(
                f"worker {worker}: step {step} comes after step {own.next_step - 1}, which was "
                "applied; is another process running as this worker?"
            )
        return own.version

    def progress(self) -> list[Progress]:
        """Return what is kept of each worker."""
        return [
            Progress(one.next_step, one.num_updates, one.version, one.below) for one in self.all
        ]

    def restore(self, kept: Sequence[Progress]) -> None:
        """Take over what was kept; nobody has joined yet."""
        self.all = [Worker(*progress, asked=progress.next_step) for progress in kept]
