"""Measure how many cores an exchange takes, which computation beside it does not have."""

import os
import time
from collections.abc import Callable

import torch

_MIN_SECONDS = 1e-9
_MOST = 0.95  # an exchange that takes all cores leaves computation some of their time


class CoreTime:
    """A work, and the number of cores that all threads of this process keep busy in it."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._busy_s = self._elapsed_s = 0.0
        self._num_calls = 0

    def __call__(self) -> None:
        """Do the work once."""
        self._num_calls += 1
        before = time.process_time(), time.perf_counter()
        self._work()
        self._busy_s += time.process_time() - before[0]
        self._elapsed_s += time.perf_counter() - before[1]

    @property
    def busy_s(self) -> float:
        """The mean seconds of cores, all together, that the work takes."""
        return self._busy_s / max(self._num_calls, 1)

    @property
    def num_cores(self) -> float:
        """The mean number of cores that were busy."""
        return self._busy_s / max(self._elapsed_s, _MIN_SECONDS)


def lost_beside(num_taken: float, num_workers: int, num_cores: int, num_threads: int) -> float:
    """Return the share of its speed that a worker's computation loses beside its exchange.

    The exchange keeps `num_taken` cores busy. Of a host's `num_cores` the threads of its workers
    leave some idle, which come first.
    """
    idle = max(0.0, num_cores / num_workers - num_threads)
    return min(_MOST, max(0.0, num_taken - idle) / num_threads)


def cores_here() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def lost_here(num_taken: float, num_workers: int) -> float:
    """Return what `lost_beside` says of this process, one of so many workers of its host."""
    return lost_beside(num_taken, num_workers, cores_here(), torch.get_num_threads())
