"""Measure the host exchange and its alternatives in the same runs."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from figures import Part, shown, table
from ranks import on_ranks

_HERE = Path(__file__).parent
_OF_SUMS = ("ms, median [quartiles]", "times the arena's", "block by block")
_OF_STEPS = ("ms a step, median [quartiles]", "times host's", "block by block")


def sums(quick: bool) -> dict[str, Any]:
    """Time sums with two and with four ranks."""
    return {f"{count} ranks": on_ranks(_HERE, "sums", count, quick) for count in (2, 4)}


def steps(case: str, num_ranks: int, quick: bool) -> dict[str, Any]:
    """Time the steps of a case of step.py."""
    return {f"{num_ranks} ranks": on_ranks(_HERE, "step", num_ranks, quick, case=case)}


def of_sums(figures: Mapping[str, Any]) -> str:
    """Return the tables of sums."""
    parts = []
    for case, rows in _cases(figures):
        lines = [(name, shown(row["seconds"], 1e3), *_ratios(row)) for name, row in rows.items()]
        parts.append(table(case, ("way", *_OF_SUMS), lines))
    return "\n\n".join(parts)


def of_steps(figures: Mapping[str, Any]) -> str:
    """Return the tables of steps."""
    parts = []
    for case, found in _cases(figures):
        rows, best = found["variants"], found["best_ddp"]
        lines = [
            (name, shown(row["seconds"], 1e3, 2), *_ratios(row), shown(row["added_s"], 1e3, 2))
            for name, row in rows.items()
        ]
        head = ("variant", *_OF_STEPS, "ms more than lone, block by block")
        parts.append(table(case, head, lines))
        parts.append(
            f"Tuned DDP ({best}) takes {rows[best]['ratio_of_medians']:.3f} times host's step; "
            f"weak scaling, the lone rank's step by host's, is "
            f"{rows['lone']['ratio_of_medians']:.1%}. Ranks that only wait for each other "
            f"(*together*) take {rows['together']['ratio_of_medians']:.1%} of host's step."
        )
        if "why" in found:
            parts.append(f"auto: {found['why']}")
    return "\n\n".join(parts)


def _cases(figures: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for ranks, cases in figures.items():
        for case, found in cases.items():
            yield f"{case}, {ranks}", found


def _ratios(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['ratio_of_medians']:.3f}", shown(row["ratio"])


PARTS = {
    "sums": Part(sums, of_sums, "Sums"),
    "alexnet": Part(partial(steps, "alexnet", 2), of_steps, "AlexNet"),
    "lenet": Part(partial(steps, "lenet5", 2), of_steps, "LeNet-5"),
    "rehearsed": Part(partial(steps, "rehearsed", 4), of_steps, "Rehearsed: AlexNet on four P100"),
}
