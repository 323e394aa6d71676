"""Divide a machine's cores among its ranks that train on CPUs."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

logger = logging.getLogger(__name__)
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
# This process's CPUs and number of threads before `share_cores`; empty without that call
_before_sharing: list[tuple[set[int], int]] = []


def share_cores(device: torch.device) -> None:
    """Pin this rank to its share of the machine's cores, with one thread per core.

    Without pinning, a message wakes the receiving rank on the sender's core, where the rank waits
    until the sender's time slice ends. Does nothing for a single rank, or if the device is a GPU.
    Does not pin if there are more ranks than cores, or if the user has set an affinity; never pins
    existing threads. If the user has set OMP_NUM_THREADS, keeps the number of threads.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    usable = os.sched_getaffinity(0)
    cores = physical_cores(usable)
    own = len(cores) // num_ranks
    if num_ranks == 1 or device.type != "cpu":
        return
    if not own and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning("%d workers share %d cores: fewer may be faster", num_ranks, len(cores))
    _before_sharing.append((usable, torch.get_num_threads()))
    if own and len(usable) == os.cpu_count():
        first = own * int(os.environ.get("LOCAL_RANK", "0"))
        # Share whole cores: two hardware threads of one core compute like one.
        os.sched_setaffinity(0, {cpu for core in cores[first : first + own] for cpu in core})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, own))


def usable_cores() -> int:
    """Return the number of CPUs that this process could use before `share_cores` pinned it."""
    return len(_before_sharing[-1][0] if _before_sharing else os.sched_getaffinity(0))


@contextmanager
def all_cores() -> Iterator[None]:
    """Use the cores and the number of threads from before `share_cores` inside the block."""
    if not _before_sharing:
        yield
        return
    now = os.sched_getaffinity(0), torch.get_num_threads()
    _set(*_before_sharing[-1])
    try:
        yield
    finally:
        _set(*now)


def _set(cores: set[int], num_threads: int) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(num_threads)


def physical_cores(usable: set[int]) -> list[tuple[int, ...]]:
    """Return the usable CPU numbers, grouped by physical core."""
    groups: dict[str, list[int]] = {}
    for cpu in sorted(usable):
        path = Path(_SIBLINGS.format(cpu))
        core = path.read_text() if path.exists() else str(cpu)
        groups.setdefault(core, []).append(cpu)
    return [tuple(cpus) for cpus in groups.values()]
