"""Measure the device memory of strategies host and tree, and the largest batch with each.

Uses a GPU per rank, one GPU that two ranks share, or CPU cores. CUDA_VISIBLE_DEVICES must list the
GPUs.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from figures import Part, table
from paceline.links.devices import num_gpus
from paceline.report.format import nbytes
from ranks import on_ranks

HERE = Path(__file__).parent
_RANKS = (2, 4)
_NETWORKS = ("lenet5", "alexnet", "resnet50")


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a network for each number of ranks."""
    return {
        world: on_ranks(HERE, "peaks", ranks, quick, gpus, network)
        for world, (ranks, gpus) in _worlds(quick).items()
    }


def _worlds(quick: bool) -> dict[str, tuple[int, int]]:
    """Return numbers of (ranks, GPUs) to measure; 0 GPUs means CPU cores."""
    found = num_gpus()
    if found == 1:
        return {"2 ranks on one GPU": (2, 1)}
    numbers = _RANKS[:1] if quick else _RANKS
    return {f"{ranks} ranks": (ranks, ranks if found >= ranks else 0) for ranks in numbers}


_WITHOUT_TREE = (
    "`tree` is not there: it sends from GPU to GPU, for which ranks that share one have only gloo, "
    "which cannot read a GPU's memory."
)


def text(network: str, by_ranks: Mapping[str, Any]) -> str:
    """Return the tables of a network."""
    return "\n\n".join(_table(network, ranks, found) for ranks, found in by_ranks.items())


def _table(network: str, ranks: str, found: Mapping[str, Any]) -> str:
    rows = []
    for name in ("host", "tree"):
        if name not in found:
            continue
        own = found[name]
        devices = [", ".join(map(nbytes, own[kind])) for kind in ("measured", "predicted")]
        rows.append((name, *devices, str(own["largest_batch"]), str(own["predicted_largest"])))
    limit = nbytes(found["limit_nbytes"])
    title = f"{network}, {ranks}, {found['batch_size']} samples a rank; devices of {limit}"
    head = ("", "measured, by rank", "predicted", "largest batch, measured", "predicted")
    drawn = table(title, head, rows)
    return drawn if "tree" in found else f"{drawn}\n\n{_WITHOUT_TREE}"


PARTS = {name: Part(partial(measure, name), partial(text, name)) for name in _NETWORKS}
