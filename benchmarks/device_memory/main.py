"""What strategies host and tree need of a device, and the largest batch with each, measured.

    python benchmarks/device_memory/main.py [NETWORK...] [--quick]

On as many GPUs as there are ranks, on one GPU that two ranks share, or on cores. Without NETWORK
all are measured. With --quick one small batch of each shows that everything works; the figures mean
nothing, and are not written.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import tables  # noqa: E402
import torch  # noqa: E402

import parts  # noqa: E402
from paceline.links.devices import num_gpus  # noqa: E402
from ranks import on_ranks  # noqa: E402

_RANKS = (2, 4)
_NETWORKS = ("lenet5", "alexnet", "resnet50")


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a network for each number of ranks."""
    return {
        world: on_ranks(HERE, "peaks", ranks, quick, gpus, network)
        for world, (ranks, gpus) in _worlds(quick).items()
    }


def _worlds(quick: bool) -> dict[str, tuple[int, int]]:
    """Return the numbers of ranks, and of the GPUs that they are on: 0 for cores."""
    found = num_gpus()
    if found == 1:
        return {"2 ranks on one GPU": (2, 1)}
    numbers = _RANKS[:1] if quick else _RANKS
    return {f"{ranks} ranks": (ranks, ranks if found >= ranks else 0) for ranks in numbers}


if __name__ == "__main__":
    torch.set_num_threads(1)  # of this process alone, which only states the machine
    parts.run(HERE, {network: partial(measure, network) for network in _NETWORKS}, tables.of)
