"""One rank of OpenMPI: sums when it is told to, and sleeps between. Knows nothing of torch.

Started by mpirun: mpi_rank.py SOCKET CPU...

Requests and replies are lines of JSON. A rank waits for them in the kernel: within MPI it would
spin, and take its core from what is measured meanwhile.
"""

import json
import os
import socket
import sys
import time
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI


@cache
def gradients(count: int) -> Any:
    """Return an array of so many float32 values, whose pages are there."""
    values = np.empty(count, np.float32)
    values.fill(0.0)
    return values


def sums(count: int, num_times: int) -> list[float]:
    """Return the seconds of each of so many sums of `count` float32 values, after one more."""
    values, world = gradients(count), MPI.COMM_WORLD
    world.Allreduce(MPI.IN_PLACE, values)
    marks = [time.perf_counter()]
    for _ in range(num_times):
        world.Allreduce(MPI.IN_PLACE, values)
        marks.append(time.perf_counter())
    return [end - start for start, end in pairwise(marks)]


def main() -> None:
    """Serve until the socket is closed."""
    address, *cpus = sys.argv[1:]
    rank = MPI.COMM_WORLD.rank
    os.sched_setaffinity(0, {int(cpus[rank % len(cpus)])})
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as stream:
            for line in stream:
                request = json.loads(line)
                reply = {"rank": rank, "seconds": sums(request["count"], request["num_times"])}
                stream.write(json.dumps(reply) + "\n")
                stream.flush()


if __name__ == "__main__":
    main()
