"""What a newcomer waits for: the demo of a clone, an installed wheel's first plan, two commands.

    python benchmarks/first_minutes/main.py [clone] [installed] [commands] [demos] [--quick]

Clones of this repository's last commit and environments are made in a temporary folder. pip takes
torch and what else is missing from where it is configured to: what that takes is part of the time.
With --quick each once; the figures mean nothing, and are not written.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tables  # noqa: E402

import parts  # noqa: E402

if __name__ == "__main__":
    parts.run_parts(HERE, tables.PARTS)
