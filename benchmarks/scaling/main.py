"""Measure how five networks scale on this machine, and compare with predictions.

Each network is one `paceline scale`. Its folder remains in runs/, so that an interrupted study can
resume.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from networks import SHAPES

from command import paceline
from figures import Part, table
from paceline.report.format import duration

_HERE = Path(__file__).parent
_FULL = (
    *("--batch-size", "16,32,64", "--scaling", "strong,weak"),
    *("--repeats", "3", "--profile-s", "0.5"),
)
_QUICK = ("--batch-size", "16", "--repeats", "1", "--profile-s", "0.2")
_STEPS, _QUICK_STEPS = {"lenet": 100}, 5  # more for LeNet, whose steps last a few milliseconds
_USUAL_STEPS = 8
_Cells = list[dict[str, Any]]


def study(network: str, quick: bool) -> dict[str, Any]:
    """Run `paceline scale` for a network and return its cells."""
    steps = _QUICK_STEPS if quick else _STEPS.get(network, _USUAL_STEPS)
    words = ("scale", f"networks:{network}", "--input-shape", SHAPES[network], "--workers", "1,2")
    folder = _HERE / "runs" / f"{network}{'-quick' * quick}"
    where = ("--steps", steps, "--output", folder)
    asked = (*words, "--kind", "measured,predicted", *(_QUICK if quick else _FULL), *where)
    found = paceline(*asked, cwd=_HERE)
    return {"images": SHAPES[network], "cells": found["cells"]}


def text(part: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a network, and the mean prediction error."""
    cells: _Cells = figures["cells"]
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    head = ("scaling", "batch", "workers", *methods)
    title = f"{part}, images of {figures['images']}: an epoch of 262,144 samples"
    lines = [table(title, head, _lines(cells, methods)), *_errors(cells)]
    return "\n\n".join(lines)


def _lines(cells: _Cells, methods: list[str]) -> Iterator[tuple[str, ...]]:
    measured = [cell for cell in cells if cell["kind"] == "measured"]
    rows: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {}
    for cell in measured:
        key = (cell["scaling"], cell["batch"], cell["workers"])
        rows.setdefault(key, {})[cell["method"]] = cell
    for (scaling, batch, workers), found in sorted(rows.items()):
        yield scaling, str(batch), str(workers), *(_shown(found[name]) for name in methods)


def _shown(cell: dict[str, Any]) -> str:
    if cell["error"] is not None:
        return cell["error"]
    lower, upper = map(duration, cell["spread"])
    return f"{duration(cell['epoch_s'])} [{lower}, {upper}]"


def _errors(cells: _Cells) -> Iterator[str]:
    """Yield the mean prediction error, if any cell is both measured and predicted."""
    keys = ("method", "workers", "batch", "scaling")
    found = {
        (cell["kind"], *(cell[key] for key in keys)): cell["epoch_s"]
        for cell in cells
        if cell["error"] is None
    }
    errors = [
        abs(found["predicted", *key] / epoch_s - 1)
        for (kind, *key), epoch_s in found.items()
        if kind == "measured" and ("predicted", *key) in found
    ]
    if errors:
        yield f"Predicted epochs are off by {100 * fmean(errors):.1f} % on average."


PARTS = {name: Part(partial(study, name), partial(text, name)) for name in SHAPES}
