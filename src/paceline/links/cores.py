"""Cores of a rank: each of a machine's ranks on CPUs computes on cores of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
_before_sharing: list[tuple[set[int], int]] = []  # the cores and threads of this process


def share_cores(device: torch.device) -> None:
    """Give each rank of this machine cores of its own, and a thread for each.

    Unpinned, the message that ends a rank's exchange wakes it on the sender's core, where it waits
    behind the sender's computation for a time slice. A single rank, ranks on GPUs, more ranks than
    cores, and what the user has set himself (an affinity, OMP_NUM_THREADS) are left alone. Threads
    that exist already stay where they are.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    usable = os.sched_getaffinity(0)
    cores = physical_cores(usable)
    own = len(cores) // num_ranks
    if num_ranks == 1 or device.type != "cpu":
        return
    _before_sharing.append((usable, torch.get_num_threads()))
    if own and len(usable) == os.cpu_count():
        first = own * int(os.environ.get("LOCAL_RANK", "0"))
        # Whole cores: two hardware threads of one core are no two cores.
        os.sched_setaffinity(0, {cpu for core in cores[first : first + own] for cpu in core})
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, own))


@contextmanager
def all_cores() -> Iterator[None]:
    """Have the cores and threads that this process had before it shared them with other ranks."""
    if not _before_sharing:
        yield
        return
    now = os.sched_getaffinity(0), torch.get_num_threads()
    _take(*_before_sharing[-1])
    try:
        yield
    finally:
        _take(*now)


def _take(cores: set[int], num_threads: int) -> None:
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(num_threads)


def physical_cores(usable: set[int]) -> list[tuple[int, ...]]:
    """Return the usable processors grouped by the core whose hardware threads they are."""
    groups: dict[str, list[int]] = {}
    for cpu in sorted(usable):
        path = Path(_SIBLINGS.format(cpu))
        core = path.read_text() if path.exists() else str(cpu)
        groups.setdefault(core, []).append(cpu)
    return [tuple(cpus) for cpus in groups.values()]
