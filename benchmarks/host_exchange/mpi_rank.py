"""Time sums on one OpenMPI rank, without torch: mpirun ... mpi_rank.py COUNT TIMES CPU..."""

import json
import os
import sys
import time
from itertools import pairwise

import numpy as np
from mpi4py import MPI


def sums(count: int, num_times: int) -> list[float]:
    """Return the seconds of `num_times` sums of `count` float32 values, after a warm-up sum."""
    values, world = np.zeros(count, np.float32), MPI.COMM_WORLD
    world.Allreduce(MPI.IN_PLACE, values)
    marks = [time.perf_counter()]
    for _ in range(num_times):
        world.Allreduce(MPI.IN_PLACE, values)
        marks.append(time.perf_counter())
    return [end - start for start, end in pairwise(marks)]


if __name__ == "__main__":
    count, num_times, *cpus = map(int, sys.argv[1:])
    rank = MPI.COMM_WORLD.rank
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
    seconds = sums(count, num_times)
    if rank == 0:
        print(json.dumps(seconds))
