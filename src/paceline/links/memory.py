"""Make malloc keep freed memory for the next step, instead of returning it to the kernel.

Each returned page costs a page fault when the next step uses it again. With large tensors these
faults can take a quarter of a step. Processes that Paceline starts get `KEEPING_MEMORY` in their
environment; forks and ranks of torchrun, which have started already, call `keep_memory`.
"""

import ctypes
import os

# Malloc keeps freed memory in a process that starts with these environment variables.
KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}  # codes of mallopt(3)


def keep_memory() -> None:
    """Make malloc keep freed memory in this process, which has started without `KEEPING_MEMORY`.

    A value that the user has set in the environment has priority. mallopt takes values up to 2 GiB.
    """
    for variable, number in _MALLOPT.items():
        value = int(os.environ.get(variable, KEEPING_MEMORY[variable]))
        ctypes.CDLL(None).mallopt(number, min(value, 2**31 - 1))
