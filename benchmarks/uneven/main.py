"""What balanced batches gain where one of two workers is four times slower.

    python benchmarks/uneven/main.py [PART...] [--quick]

The slower worker is stretched: real arithmetic, and then it waits. Without PART all are measured.
With --quick a few steps show that everything works; the figures mean nothing, and are not written.
"""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import alexnet  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402

import parts  # noqa: E402
from ranks import on_ranks  # noqa: E402


def mlp(quick: bool) -> dict[str, Any]:
    """Return the figures of the digits MLP, in a user's own loop."""
    return on_ranks(HERE, "mlp", 2, quick)


if __name__ == "__main__":
    torch.set_num_threads(1)
    parts.run(HERE, {"mlp": mlp, "alexnet": alexnet.measure}, tables.of)
