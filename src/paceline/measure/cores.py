"""Measure how many cores an exchange keeps busy, and how much that slows computation."""

import os
import time
from collections.abc import Callable

import torch

MIN_SECONDS = 1e-9
_MOST = 0.95  # computation gets some time even if an exchange keeps all cores busy


class CoreTime:
    """Calls `work`, and measures how many cores this process keeps busy meanwhile."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._busy_s = self._elapsed_s = 0.0
        self._num_calls = 0

    def __call__(self) -> None:
        """Call the work once."""
        self._num_calls += 1
        before = time.process_time(), time.perf_counter()
        self._work()
        self._busy_s += time.process_time() - before[0]
        self._elapsed_s += time.perf_counter() - before[1]

    @property
    def busy_s(self) -> float:
        """Mean processor time of a call, summed over all threads."""
        return self._busy_s / max(self._num_calls, 1)

    @property
    def num_cores(self) -> float:
        """Mean number of busy cores."""
        return self._busy_s / max(self._elapsed_s, MIN_SECONDS)


def lost_beside(num_taken: float, num_workers: int, num_cores: int, num_threads: int) -> float:
    """Return the share of speed that a worker's computation loses during an exchange.

    The exchange keeps `num_taken` cores busy, and uses idle cores first. `num_workers` workers
    share the host's `num_cores` cores, and each worker computes with `num_threads` threads.
    """
    idle = max(0.0, num_cores / num_workers - num_threads)
    return min(_MOST, max(0.0, num_taken - idle) / num_threads)


def cores_here() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0))


def lost_here(num_taken: float, num_workers: int) -> float:
    """Return `lost_beside` with the cores and threads of this process."""
    return lost_beside(num_taken, num_workers, cores_here(), torch.get_num_threads())
