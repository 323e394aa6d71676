"""Which cores a rank computes on."""

import os

import torch


def share_cores(device: torch.device) -> None:
    """Give each rank of this machine cores of its own, and a thread for each.

    Unpinned, the message that ends a rank's exchange wakes it on the sender's core, where it waits
    behind the sender's computation for a time slice. Ranks on GPUs, more ranks than cores, and
    whatever the user has set himself (an affinity, OMP_NUM_THREADS) are left alone.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    own = len(cores) // num_ranks
    if device.type == "cpu" and own and len(cores) == os.cpu_count():
        first = own * int(os.environ.get("LOCAL_RANK", "0"))
        os.sched_setaffinity(0, cores[first : first + own])
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, own))
