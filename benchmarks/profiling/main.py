"""What a profile costs, whether its stages add up to the step, and whether torch.profiler agrees.

    python benchmarks/profiling/main.py [NETWORK...] [--quick]

Each run is a `paceline profile` of its own, of one worker with a batch of 16. Without NETWORK all
five are profiled. With --quick a few steps show that everything works; the figures mean nothing,
and are not written.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
SCALING = HERE.parent / "scaling"  # whose networks these are
sys.path[:0] = [str(HERE), str(HERE.parent), str(SCALING)]
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import networks  # noqa: E402
import tables  # noqa: E402

import parts  # noqa: E402
from paceline.records.profile import ProfileResult  # noqa: E402

_RUNS, _QUICK_RUNS = 3, 1
_STEPS = {"lenet": 1000, "alexnet": 60, "googlenet": 100, "inception": 60, "resnet": 60}
_QUICK_STEPS = 8
_DEADLINE_S = 900.0


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return what the runs of a network found: a value a run, and the medians of its steps."""
    steps = _QUICK_STEPS if quick else _STEPS[network]
    runs = [_profile(network, steps) for _ in range(_QUICK_RUNS if quick else _RUNS)]
    return {
        "images": networks.SHAPES[network],
        "steps": steps,
        "step_s": median(run.step.median_s for run in runs),
        "cost": [run.cost for run in runs],
        "stages_error": [run.stages_error for run in runs],
        "phases": {row.phase: _phase(runs, row.phase) for row in runs[0].agreement},
    }


def _profile(network: str, steps: int) -> ProfileResult:
    command = (
        *(sys.executable, "-m", "paceline", "profile", f"networks:{network}", "--json"),
        *("--data", f"synthetic:{networks.SHAPES[network]}", "--batch-size", "16"),
        *("--steps", str(steps), "--output", str(HERE / "runs")),
    )
    done = subprocess.run(
        command, cwd=SCALING, stdout=subprocess.PIPE, timeout=_DEADLINE_S, check=True
    )
    found = ProfileResult.model_validate(json.loads(done.stdout))
    print(f"{network}: recording {found.cost:+.1%}", file=sys.stderr, flush=True)
    return found


def _phase(runs: list[ProfileResult], phase: str) -> dict[str, Any]:
    rows = [row for run in runs for row in run.agreement if row.phase == phase]
    return {"seconds": median(row.ours_s for row in rows), "error": [row.error for row in rows]}


if __name__ == "__main__":
    known: dict[str, Callable[[bool], dict[str, Any]]] = {
        network: partial(measure, network) for network in networks.SHAPES
    }
    parts.run(HERE, known, tables.of)
