"""Compare the time to a target loss of `hogbatch` on CPU+GPU and GPU alone.

One worker on all CPU cores but two, and one on GPU 0, train the covtype network with the batch
sizes of Ma, Rusu et al. 2020, table II: 1 to 64 samples per thread, 64 to 8192 on the GPU. For each
variant, runs with an extra seed choose the fastest learning rate, and runs with other seeds follow.
A time limit per variant bounds the number of rates and seeds.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from part import Part

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Outcome
from paceline.core.settings import TrainSettings
from paceline.links.forkserver import open_server
from paceline.links.processes import KEEPING_MEMORY

sys.path.append(str(Path(__file__).parents[2] / "hogbatch"))

from cases import Goal, runner_of, settings, trained
from target import GOAL, SEEDS

_RATES = (1.0, 0.3, 3.0, 0.1)  # for the GPU's largest batch, the most likely first
_UNCOUNTED_SEED = 100
_CPU_BATCH, _GPU_BATCH = (1, 64), (64, 8192)
_SMOKE_CPU_BATCH, _SMOKE_GPU_BATCH = (1, 16), (16, 256)
_EPOCHS, _SMOKE_EPOCHS = 100, 1  # a GPU alone makes few updates in each
_PROFILE_S, _SMOKE_PROFILE_S = 1.0, 0.1
_FREE_CORES = 2  # for the coordinator and the process that feeds the GPU
_WAY_S, _RUN_S = 22.0, 3.0  # limits for all runs of a variant, and for one run's training
_WORKER = "paceline.strategies.hogbatch.worker"


def run(part: Part) -> None:
    """Train each variant until it reaches the target or its time limit."""
    # Workers require this environment, and a fork server with another one does not fork them.
    with open_server([_WORKER], KEEPING_MEMORY | os.environ | {"OMP_NUM_THREADS": "1"}):
        for name, way in ways().items():
            found = _way(way, part.smoke)
            part.keep(name, found, _line(found))


def _line(found: dict[str, Any]) -> str:
    if not found["runs"]:
        return "no run had a finite loss"
    middle = found["median_s"]
    target = "target not reached" if middle is None else f"target in {middle:.3g} s"
    busy = ", ".join(f"{name} {share:.0%}" for name, share in found["utilisation"].items())
    return f"{target}, {found['samples_per_s']:,.0f} samples/s, busy: {busy}"


def ways() -> dict[str, dict[str, Any]]:
    """Return the workers and the policy of each variant."""
    cores = max(1, len(os.sched_getaffinity(0)) - _FREE_CORES)
    both = f"cpu:{cores},gpu:0"
    return {
        "GPU alone": {"workers": "gpu:0", "policy": "cpu_gpu"},
        "CPU+GPU": {"workers": both, "policy": "cpu_gpu"},
        "adaptive": {"workers": both, "policy": "adaptive"},
    }


def _way(way: dict[str, Any], smoke: bool) -> dict[str, Any]:
    """Choose a variant's learning rate, train with each seed, and return the results."""
    goal = Goal(GOAL.loss, _SMOKE_EPOCHS if smoke else _EPOCHS)
    begun = time.monotonic()
    tried: dict[float, dict[str, Any] | None] = {}
    for rate in _RATES[:1] if smoke else _RATES:
        tried[rate] = _run(goal, _settings(way, goal, rate, _UNCOUNTED_SEED, smoke))
        if time.monotonic() > begun + _WAY_S / 2:
            break
    best = _best(tried)
    runs = []
    for seed in [] if best is None else range(1) if smoke else SEEDS:
        if (one := _run(goal, _settings(way, goal, best, seed, smoke))) is not None:
            runs.append(one)
        if time.monotonic() > begun + _WAY_S:
            break
    return {"rate": best, "rates_tried": list(tried), **_over(runs), "runs": runs}


def _best(tried: dict[float, dict[str, Any] | None]) -> float | None:
    """Return the rate that reached the target first or, if none, has the lowest loss."""
    finite = {rate: one for rate, one in tried.items() if one is not None}
    return min(
        finite,
        key=lambda rate: (finite[rate]["seconds"] or _RUN_S, finite[rate]["loss"]),
        default=None,
    )


def _over(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not runs:
        return {}
    took = [one["seconds"] for one in runs]
    reached = [one for one in took if one is not None]
    return {
        "median_s": median(reached) if len(reached) == len(runs) else None,
        "seconds": took,
        "samples_per_s": fmean(one["samples_per_s"] for one in runs),
        "updates": dict(sum((Counter(one["updates"]) for one in runs), Counter())),
        "utilisation": {
            name: fmean(one["utilisation"][name] for one in runs) for name in runs[0]["utilisation"]
        },
    }


def _settings(
    way: dict[str, Any], goal: Goal, rate: float, seed: int, smoke: bool
) -> TrainSettings:
    on_cpu, on_gpu = (_SMOKE_CPU_BATCH, _SMOKE_GPU_BATCH) if smoke else (_CPU_BATCH, _GPU_BATCH)
    options = {"policy": way["policy"], "cpu_batch": on_cpu, "gpu_batch": on_gpu}
    return settings(
        smoke,
        workers=way["workers"],
        options=options,
        learning_rate=rate,
        seed=seed,
        batch_size=on_gpu[1],
        epochs=goal.epochs,
        profile_s=_SMOKE_PROFILE_S if smoke else _PROFILE_S,
    )


def _run(goal: Goal, wanted: TrainSettings) -> dict[str, Any] | None:
    """Train until the goal or the time limit; return None if the loss diverges."""
    try:
        with runner_of(wanted) as runner:
            until = time.monotonic() + _RUN_S
            outcome = trained(
                runner, lambda epoch: epoch.test_loss <= goal.loss or time.monotonic() > until
            )
    except InvalidInput as error:
        if not str(error).startswith("learning_rate: "):
            raise
        return None
    return _figures(goal, outcome)


def _figures(goal: Goal, outcome: Outcome) -> dict[str, Any]:
    assert outcome.updates is not None  # every run has updates
    loss = outcome.epochs[-1].test_loss
    return {
        "seconds": outcome.trained_s if loss <= goal.loss else None,
        "loss": loss,
        "epochs": len(outcome.epochs),
        "samples_per_s": outcome.samples_per_s,
        "updates": dict(outcome.updates.by_worker),
        "utilisation": dict(outcome.utilisation),
    }
