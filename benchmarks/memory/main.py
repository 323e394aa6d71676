"""What a training step takes of memory: predicted without running it, and as PyTorch counts it.

    python benchmarks/memory/main.py [NETWORK...] [--quick]

The five networks of Mojumder et al. 2018, each with batches of 16, 32 and 64 images of its own
size. Every cell is a process of its own. Without NETWORK all are measured. With --quick one small
batch of each shows that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tables  # noqa: E402
import torch  # noqa: E402

import parts  # noqa: E402

_NETWORKS = ("lenet5", "alexnet", "googlenet", "inception-v3", "resnet50")
_BATCHES, _QUICK_BATCHES = (16, 32, 64), (2,)
_DEADLINE_S = 600.0


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return the bytes of a network's batches, by batch."""
    return {str(size): _cell(network, size) for size in (_QUICK_BATCHES if quick else _BATCHES)}


def _cell(network: str, batch_size: int) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "cell.py"), network, str(batch_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_DEADLINE_S, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    print(f"{network} {batch_size}: {figures['error']:+.1%}", file=sys.stderr, flush=True)
    return figures


if __name__ == "__main__":
    torch.set_num_threads(1)  # of this process alone, which only states the machine
    known: dict[str, Callable[[bool], dict[str, Any]]] = {
        network: partial(measure, network) for network in _NETWORKS
    }
    parts.run(HERE, known, tables.of)
