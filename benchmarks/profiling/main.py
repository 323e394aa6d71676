"""Measure the overhead of profiles, and check their stages against steps and torch.profiler.

Each run is a separate `paceline profile` of one worker with a batch of 16.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from command import paceline
from figures import Part, table
from paceline.records.profile import ProfileResult
from paceline.report.format import duration
from scaling.networks import SHAPES

_SCALING = Path(__file__).parents[1] / "scaling"  # has networks.py
_RUNS, _QUICK_RUNS = 3, 1
_STEPS = {"lenet": 1000, "alexnet": 60, "googlenet": 100, "inception": 60, "resnet": 60}
_QUICK_STEPS = 8


def measure(network: str, quick: bool) -> dict[str, Any]:
    """Return a network's median step time, and each run's overhead and errors."""
    steps = _QUICK_STEPS if quick else _STEPS[network]
    runs = [_profile(network, steps) for _ in range(_QUICK_RUNS if quick else _RUNS)]
    phases: dict[str, Any] = {}
    for phase in (row.phase for row in runs[0].agreement):
        rows = [row for run in runs for row in run.agreement if row.phase == phase]
        seconds = median(row.ours_s for row in rows)
        phases[phase] = {"seconds": seconds, "error": [row.error for row in rows]}
    return {
        "images": SHAPES[network],
        "steps": steps,
        "step_s": median(run.step.median_s for run in runs),
        "cost": [run.cost for run in runs],
        "stages_error": [run.stages_error for run in runs],
        "phases": phases,
    }


def _profile(network: str, steps: int) -> ProfileResult:
    data = f"synthetic:{SHAPES[network]}"
    words = ("profile", f"networks:{network}", "--data", data, "--batch-size", 16, "--steps", steps)
    found = ProfileResult.model_validate(paceline(*words, cwd=_SCALING))
    print(f"{network}: recording {found.cost:+.1%}", file=sys.stderr, flush=True)
    return found


def text(network: str, figures: Mapping[str, Any]) -> str:
    """Return the table of a network."""
    rows = {
        "recorded steps longer than plain ones": figures["cost"],
        "sum of the stages against the steps by the clock": figures["stages_error"],
    }
    rows |= {
        f"{phase} ({duration(found['seconds'])}): our spans against torch.profiler": found["error"]
        for phase, found in figures["phases"].items()
    }
    title = (
        f"{network}, 16 images of {figures['images']}, {duration(figures['step_s'])} a step, "
        f"{figures['steps']} steps of each kind a run"
    )
    head = ("", "median of the runs", "least, most")
    return table(title, head, [(name, *_shown(values)) for name, values in rows.items()])


def _shown(values: Sequence[float]) -> tuple[str, str]:
    return f"{median(values):+.2%}", f"{min(values):+.2%}, {max(values):+.2%}"


PARTS = {name: Part(partial(measure, name), partial(text, name)) for name in SHAPES}
