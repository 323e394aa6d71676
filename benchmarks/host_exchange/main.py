"""What the host exchange gains, measured beside what else there is, in the same run."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mpi
import tables

from figures import Part
from ranks import on_ranks

# glibc gives large tensors back to the system when they are freed, and gets them page by page again
# in the next step. With these, all variants keep their memory: both are worth comparing.
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def measure(
    name: str, ranks: tuple[int, ...], quick: bool, case: str | None = None
) -> dict[str, Any]:
    """Return the figures of a module of this folder for each number of ranks."""
    if name == "sums" and (problem := mpi.install()):
        print(f"OpenMPI is left out, because it cannot be installed: {problem}", flush=True)
    folder = Path(__file__).parent
    return {f"{n} ranks": on_ranks(folder, name, n, quick, case=case) for n in ranks}


def built_in(model: str, quick: bool, *, keeps_memory: bool = False) -> dict[str, Any]:
    """Return the figures of a model's step on two ranks."""
    with patch.dict(os.environ, _KEPT if keeps_memory else {}):
        return measure("built_in", (2,), quick, model)


def text(one: Callable[[str, Any], str], by_ranks: Mapping[str, Any]) -> str:
    """Return the tables of all numbers of ranks."""
    return "\n\n".join(one(ranks, figures) for ranks, figures in by_ranks.items())


_SUMS, _STEPS, _CHUNKS = (partial(text, one) for one in (tables.sums, tables.steps, tables.chunks))
_KEPT_TITLE = "AlexNet, freed memory kept by all variants"
_REHEARSED = "Rehearsed: AlexNet on four P100"
_CHUNKED = "Rehearsed: the chunk of ResNet-152 on four P100"
PARTS = {
    "sums": Part(partial(measure, "sums", (2, 4)), _SUMS, "Sums"),
    "alexnet": Part(partial(built_in, "alexnet"), _STEPS, "AlexNet"),
    "alexnet-kept": Part(partial(built_in, "alexnet", keeps_memory=True), _STEPS, _KEPT_TITLE),
    "lenet": Part(partial(built_in, "lenet5"), _STEPS, "LeNet-5"),
    "rehearsed": Part(partial(measure, "rehearsed", (4,)), _STEPS, _REHEARSED),
    "chunks": Part(partial(measure, "chunks", (4,)), _CHUNKS, _CHUNKED),
}
