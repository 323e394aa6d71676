"""A policy of the user's: imported, made for the workers, and asked for sizes that are checked.

class Smallest:
    def __init__(self, workers):
        self.most = [spec.threads for spec in workers.specs]

    def next_batch(self, worker, updates, sizes):
        return self.most[worker]
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidInput, first_line, shown
from paceline.core.importing import imported


@dataclass(frozen=True, slots=True)
class OwnPolicy:
    """A policy of the user's, of which every answer is checked."""

    name: str
    policy: Any
    most: tuple[int, ...]

    @classmethod
    def of(cls, name: str, workers: Any) -> "OwnPolicy":
        """Import package.module:Policy and make it for `workers`; InvalidInput if that fails."""
        make = imported("policy", name)
        num_workers = len(workers.specs)
        with _blaming(f"{name!r} cannot be made for {num_workers} workers"):
            policy = make(workers)
            _, most = policy.next_batch, tuple(policy.most)
        if len(most) != num_workers or not all(map(_is_size, most)):
            raise InvalidInput(
                "policy",
                f"{name!r} has to have most, the largest batch of each of {num_workers} workers, "
                f"not {shown(most)}",
            )
        return cls(name, policy, most)

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size that it gives; InvalidInput if it fails, or gives none."""
        with _blaming(f"{self.name!r} fails for worker {worker}"):
            size = self.policy.next_batch(worker, tuple(updates), tuple(sizes))
        if not _is_size(size) or size > self.most[worker]:
            raise InvalidInput(
                "policy",
                f"{self.name!r} gives worker {worker} a batch of {shown(size)}",
                hint=f"a whole number from 1 to its most, {self.most[worker]}, is needed",
            )
        return int(size)


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InvalidInput("policy", f"{what}: {first_line(error)}") from error


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
