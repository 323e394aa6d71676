"""The table of killed and resumed runs, in a terminal and in README.md."""

from collections import Counter
from pathlib import Path
from typing import Any

import readme

STARTING = "while it starts"
BEFORE = "before the first checkpoint"
WRITING = "while one is written"
BETWEEN = "between two"
AFTER = "after the last step"
_MOMENTS = (STARTING, BEFORE, WRITING, BETWEEN, AFTER)


def of(name: str, figures: dict[str, Any]) -> str:
    """Return the table of a strategy: its kills by process and moment, and what came of them."""
    kills, runs = figures["kills"], figures["runs"]
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
        f"{name}: {len(kills)} kills; {num_equal} of {len(runs)} runs ended with the bits of the "
        f"undisturbed one; left behind: {', '.join(left) or 'nothing'}"
    )
    return readme.table(verdict, head, lines)


if __name__ == "__main__":
    readme.fill(Path(__file__).parent, ["result.json"], of)
