"""How five networks scale on this machine: measured beside what each run has predicted before.

    python benchmarks/scaling/main.py [NETWORK...] [--quick]

Each network is one `paceline scale`, whose folder stays in runs/: an interrupted one goes on where
it was. Without NETWORK all are studied. With --quick a few steps show that everything works; the
figures mean nothing, and are not written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import networks  # noqa: E402
import tables  # noqa: E402

import parts  # noqa: E402

_FULL = (
    *("--batch-size", "16,32,64", "--scaling", "strong,weak"),
    *("--repeats", "3", "--profile-s", "0.5"),
)
_QUICK = ("--batch-size", "16", "--repeats", "1", "--profile-s", "0.2")
_STEPS, _QUICK_STEPS = {"lenet": 100}, 5  # LeNet's take a few milliseconds
_USUAL_STEPS = 8


def study(network: str, quick: bool) -> dict[str, Any]:
    """Return the cells of a network, and what they say."""
    asked = ("--input-shape", networks.SHAPES[network], "--workers", "1,2")
    steps = _QUICK_STEPS if quick else _STEPS.get(network, _USUAL_STEPS)
    folder = HERE / "runs" / f"{network}{'-quick' * quick}"
    command = [sys.executable, "-m", "paceline", "scale", f"networks:{network}", *asked]
    command += ["--measure", "--predict", "--json"]
    done = subprocess.run(
        [*command, *(_QUICK if quick else _FULL), "--steps", str(steps), "--output", folder],
        cwd=HERE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    return {"images": networks.SHAPES[network], "cells": found["cells"]}


if __name__ == "__main__":
    measures: dict[str, Callable[[bool], dict[str, Any]]] = {
        network: partial(study, network) for network in networks.SHAPES
    }
    parts.run(HERE, measures, tables.of)
