"""What codecs cost and what they lose, measured beside what else there is, in the same run.

    python benchmarks/codecs/main.py [PART...] [--quick]

Without PART all are measured. With --quick a few values show that everything works; the figures
mean nothing, and are not written.
"""

import os
import sys
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
_THREADS = 2
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = str(_THREADS)  # bitsandbytes cannot be told later

import speed  # noqa: E402
import table2  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402
import two_hosts  # noqa: E402

import parts  # noqa: E402
from readme import Part  # noqa: E402

PARTS = {
    "kernels": Part("Kernels on the CPU", speed.measure, speed.text),
    "table2": Part("Table 2 of the paper", table2.measure, table2.text),
    "training": Part("Training", training.measure, training.text),
    **{
        rate: Part(
            f"AlexNet, 16 images a rank: {place}",
            partial(two_hosts.measure, rate),
            partial(two_hosts.text, rate),
        )
        for rate, place in (
            ("1gbit", "two hosts at 1 Gbit/s"),
            ("100mbit", "two hosts at 100 Mbit/s"),
            ("loopback", "two ranks on loopback"),
        )
    },
}


if __name__ == "__main__":
    torch.set_num_threads(_THREADS)
    parts.run_parts(HERE, PARTS)
