"""What strategy wheel sends, and what it gains where the network is slow.

    python benchmarks/wheel/main.py [bytes] [rehearsed] [heads] [real] [turns] [epochs] [--quick]

Without a part all are measured; all but epochs need root, for two network namespaces. With --quick
a few steps show that everything works; the figures mean nothing, and are not written.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "network")]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

import tables  # noqa: E402

import parts  # noqa: E402

if __name__ == "__main__":
    parts.run(HERE, {name: part.measure for name, part in tables.PARTS.items()}, tables.of)
