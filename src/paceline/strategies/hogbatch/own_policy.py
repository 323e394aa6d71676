"""A policy of the user's: imported, made for the workers, and asked for sizes that are checked.

class Smallest:
    def __init__(self, workers):
        self.most = [spec.threads for spec in workers.specs]

    def next_batch(self, worker, updates, sizes):
        return self.most[worker]
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from paceline.core.errors import InvalidInput, first_line, shown


def own_policy(name: str, workers: Any, num_workers: int) -> Any:
    """Import package.module:Policy, and call it with the workers; InvalidInput if that fails."""
    policy = _made(name, workers)
    if not callable(getattr(policy, "next_batch", None)):
        raise InvalidInput("policy", f"{name!r} has no next_batch(worker, updates, sizes)")
    most = getattr(policy, "most", None)
    if not isinstance(most, Sequence) or not all(map(_is_size, most)) or len(most) != num_workers:
        raise InvalidInput(
            "policy",
            f"{name!r} has to have most, the largest batch of each of {num_workers} workers, not "
            f"{shown(most)}",
        )
    return policy


def _made(name: str, workers: Any) -> Any:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` finds modules
        sys.path.insert(0, here)
    try:
        make = attrgetter(attribute)(importlib.import_module(module))
    except (Exception, SystemExit) as error:
        raise InvalidInput("policy", f"{name!r} cannot be imported: {first_line(error)}") from error
    try:
        return make(workers)
    except Exception as error:
        raise InvalidInput(
            "policy",
            f"{name!r} cannot be made for {len(workers.specs)} workers: {first_line(error)}",
        ) from error


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, slots=True)
class OwnPolicy:
    """A policy of the user's, of which every answer is checked."""

    name: str
    policy: Any
    most: tuple[int, ...]

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size that it gives; InvalidInput if it fails, or gives none."""
        try:
            size = self.policy.next_batch(worker, tuple(updates), tuple(sizes))
        except Exception as error:
            raise InvalidInput(
                "policy", f"{self.name!r} fails for worker {worker}: {first_line(error)}"
            ) from error
        if not _is_size(size) or size > self.most[worker]:
            raise InvalidInput(
                "policy",
                f"{self.name!r} gives worker {worker} a batch of {shown(size)}",
                hint=f"a whole number from 1 to its most, {self.most[worker]}, is needed",
            )
        return int(size)
