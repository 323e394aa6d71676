"""Uneven workers on one model: what the coordinator costs, and what the policies gain.

python benchmarks/hogbatch/main.py [coordinator] [ratios] [target] [public] [--quick]
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

import coordinator  # noqa: E402
import ideal  # noqa: E402
import public  # noqa: E402
import ratios  # noqa: E402
import tables  # noqa: E402
import target  # noqa: E402

import parts  # noqa: E402

PARTS = {
    "coordinator": coordinator.measure,
    "ratios": ratios.measure,
    "target": target.measure,
    "ideal": ideal.measure,
    "public": public.measure,
}

if __name__ == "__main__":
    parts.run(HERE, PARTS, tables.of)
