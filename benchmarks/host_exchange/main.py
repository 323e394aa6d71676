"""What the host exchange gains, measured beside what else there is, in the same run.

    python benchmarks/host_exchange/main.py [PART...] [--quick]

Without PART all are measured. With --quick a few steps show that everything works; the figures mean
nothing, and are not written.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu

import mpi  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

import parts  # noqa: E402
from ranks import on_ranks  # noqa: E402

PARTS = {
    "sums": (2, 4),
    "alexnet": (2,),
    "alexnet-kept": (2,),
    "lenet": (2,),
    "rehearsed": (4,),
    "chunks": (4,),
}
# glibc gives large tensors back to the system when they are freed, and gets them page by page again
# in the next step. With these, all variants keep their memory: both are worth comparing.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def measure(part: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a part for each number of ranks."""
    if part == "sums":
        problem = mpi.install()
        if problem:
            print(f"OpenMPI is left out, because it cannot be installed: {problem}", flush=True)
    name, _, kept = part.partition("-")
    os.environ.update(KEPT if kept else {})
    figures = {f"{n} ranks": on_ranks(HERE, name, n, quick) for n in PARTS[part]}
    for variable in KEPT if kept else ():
        del os.environ[variable]
    return figures


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts.run(HERE, {name: partial(measure, name) for name in PARTS}, tables.of)
