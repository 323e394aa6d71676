"""Measure the host exchange and its alternatives in the same runs."""

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

# glibc returns large freed tensors to the system, and the next step gets new memory page by page.
# With these settings all variants keep freed memory. The benchmark measures both cases.
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def measure(
    name: str, ranks: tuple[int, ...], quick: bool, case: str | None = None
) -> dict[str, Any]:
    """Run the part `name` (a module of this folder) with each number of ranks."""
    if name == "sums" and (problem := mpi.install()):
        print(f"OpenMPI is left out, because it cannot be installed: {problem}", flush=True)
    folder = Path(__file__).parent
    return {f"{n} ranks": on_ranks(folder, name, n, quick, case=case) for n in ranks}


def built_in(model: str, quick: bool, *, keeps_memory: bool = False) -> dict[str, Any]:
    """Measure a model's steps on two ranks; `keeps_memory` makes glibc keep freed memory."""
    with patch.dict(os.environ, _KEPT if keeps_memory else {}):
        return measure("built_in", (2,), quick, model)


def text(one: Callable[[str, Any], str], by_ranks: Mapping[str, Any]) -> str:
    """Format the tables of all numbers of ranks."""
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
