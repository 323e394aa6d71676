"""What codecs cost and what they lose, measured beside what else there is, in the same run.

    python benchmarks/codecs/main.py [PART...] [--quick]

Without PART all are measured. With --quick a few values show that everything works; the figures
mean nothing, and are not written.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
_THREADS = 2
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = str(_THREADS)  # bitsandbytes cannot be told later

import tables  # noqa: E402
import torch  # noqa: E402

import parts  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(_THREADS)
    parts.run(HERE, {name: part.measure for name, part in tables.PARTS.items()}, tables.of)
