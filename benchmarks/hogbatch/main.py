"""Uneven workers on one model: what the coordinator costs, and what the policies gain.

    python benchmarks/hogbatch/main.py [PART ...] [--quick]

Parts are coordinator, ratios, small, target, ideal and public; without one all are measured. With
--quick a few batches show that everything works; the figures mean nothing, and are not written.
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
import small  # noqa: E402
import tables  # noqa: E402
import target  # noqa: E402

import parts  # noqa: E402

PARTS = {
    "coordinator": coordinator.measure,
    "ratios": ratios.measure,
    "small": small.measure,
    "target": target.measure,
    "ideal": ideal.measure,
    "public": public.measure,
}

if __name__ == "__main__":
    parts.run(HERE, PARTS, tables.of)
