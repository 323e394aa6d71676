"""The tables of killed and resumed runs, as the README shows them.

    python benchmarks/resume/tables.py

puts them into README.md, between the lines that say so, and prints what came of all together.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import readme

STARTING = "while it starts"
BEFORE = "before the first checkpoint"
WRITING = "while one is written"
BETWEEN = "between two"
AFTER = "after the last step"
_MOMENTS = (STARTING, BEFORE, WRITING, BETWEEN, AFTER)


def of(name: str, figures: dict[str, Any]) -> str:
    """Return the table of a strategy: its kills by process and moment, and what came of them."""
    kills, runs = figures["kills"], _disturbed(figures["runs"])
    head = ["killed", *_MOMENTS, "all gone after at most, s"]
    lines = []
    for role in sorted({one["role"] for one in kills}):
        own = [one for one in kills if one["role"] == role]
        by_moment = Counter(one["when"] for one in own)
        slowest = max(one["ended_s"] for one in own)
        counts = [str(by_moment[moment]) for moment in _MOMENTS]
        lines.append([role, *counts, f"{slowest:.1f}"])
    num_equal = sum(one["is_equal"] for one in runs)
    left = [what for one in (*kills, *runs) for what in one.get("left", ())]
    verdict = (
        f"{name}: {len(kills)} kills; {num_equal} of {len(runs)} runs that they ended went on "
        f"to the bits of the undisturbed one; left behind: {', '.join(left) or 'nothing'}"
    )
    return readme.table(verdict, head, lines)


def _disturbed(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs that were ended by a kill, and so took more than one attempt."""
    return [one for one in runs if one["attempts"] > 1]


def together(kills: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> str:
    """Return what came of the kills of all strategies, in a sentence."""
    by_moment = Counter(one["when"] for one in kills)
    counts = ", ".join(f"{by_moment[moment]} {moment}" for moment in _MOMENTS)
    half = sum(one["half_written"] for one in kills)
    num_equal = sum(one["is_equal"] for one in runs)
    return (
        f"**All together**: {len(kills)} kills ({counts}), {half} of which left a checkpoint "
        f"half written; {num_equal} of {len(runs)} runs that they ended went on to the bits of the "
        "undisturbed one."
    )


if __name__ == "__main__":
    folder = Path(__file__).parent
    readme.fill(folder, ["result.json"], of)
    figures = json.loads((folder / "result.json").read_text())["figures"].values()
    kills = [one for figure in figures for one in figure["kills"]]
    runs = [one for figure in figures for one in _disturbed(figure["runs"])]
    print(together(kills, runs))
