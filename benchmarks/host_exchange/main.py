"""Measure the host exchange and its alternatives in the same runs."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mpi
import tables

from figures import Part
from ranks import on_ranks


def measure(
    name: str, ranks: tuple[int, ...], quick: bool, case: str | None = None
) -> dict[str, Any]:
    """Run the part `name` (a module of this folder) with each number of ranks."""
    if name == "sums" and (problem := mpi.install()):
        print(f"OpenMPI is left out, because it cannot be installed: {problem}", flush=True)
    folder = Path(__file__).parent
    return {f"{n} ranks": on_ranks(folder, name, n, quick, case=case) for n in ranks}


def text(one: Callable[[str, Any], str], by_ranks: Mapping[str, Any]) -> str:
    """Format the tables of all numbers of ranks."""
    return "\n\n".join(one(ranks, figures) for ranks, figures in by_ranks.items())


_SUMS, _STEPS = partial(text, tables.sums), partial(text, tables.steps)
_BUILT_IN = partial(measure, "built_in", (2,))
_REHEARSED = "Rehearsed: AlexNet on four P100"
PARTS = {
    "sums": Part(partial(measure, "sums", (2, 4)), _SUMS, "Sums"),
    "alexnet": Part(partial(_BUILT_IN, case="alexnet"), _STEPS, "AlexNet"),
    "lenet": Part(partial(_BUILT_IN, case="lenet5"), _STEPS, "LeNet-5"),
    "rehearsed": Part(partial(measure, "rehearsed", (4,)), _STEPS, _REHEARSED),
}
