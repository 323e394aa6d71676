"""Cores beside a GPU, against the GPU alone; writes gpu.json.

    python benchmarks/hogbatch/gpu.py [--quick]

One worker on all cores but two, and one on GPU 0, train the network for covtype with the batch
sizes of Ma, Rusu et al. 2020, table II: 1 to 64 samples a thread, 64 to 8192 on the GPU. Each way
has the learning rate of one grid that is fastest with a seed that is not counted. Without a GPU it
ends with exit code 2.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import tables  # noqa: E402
import torch  # noqa: E402
from cases import Goal, runner_of, settings, trained  # noqa: E402
from target import GOAL, QUICK_GOAL, SEEDS  # noqa: E402

from paceline.core.errors import InvalidInput  # noqa: E402
from paceline.core.outcome import Outcome  # noqa: E402
from paceline.core.settings import TrainSettings  # noqa: E402
from paceline.measure.this_machine import facts  # noqa: E402

_RATES = (0.3, 1.0, 3.0, 10.0, 30.0)  # for the GPU's largest batch
_UNCOUNTED_SEED = 100
_CPU_BATCH, _GPU_BATCH = (1, 64), (64, 8192)
_QUICK_CPU_BATCH, _QUICK_GPU_BATCH = (1, 16), (16, 256)
_EPOCHS = 100  # a GPU alone makes few updates in each
_FREE_CORES = 2  # for the coordinator, and the process that feeds the GPU


def ways() -> dict[str, dict[str, Any]]:
    """Return what distinguishes the ways to train: workers and policy."""
    cores = max(1, len(os.sched_getaffinity(0)) - _FREE_CORES)
    both = f"cpu:{cores},gpu:0"
    return {
        "GPU alone": {"workers": "gpu:0", "policy": "cpu_gpu"},
        "CPU+GPU": {"workers": both, "policy": "cpu_gpu"},
        "adaptive": {"workers": both, "policy": "adaptive"},
    }


def measure(quick: bool) -> dict[str, Any]:
    """Return of each way what its runs did, with its best learning rate."""
    goal = QUICK_GOAL if quick else Goal(GOAL.loss, _EPOCHS)
    rates, seeds = (_RATES[1:2], range(1)) if quick else (_RATES, SEEDS)
    return {name: _way(way, goal, rates, seeds, quick) for name, way in ways().items()}


def _way(
    way: dict[str, Any], goal: Goal, rates: tuple[float, ...], seeds: range, quick: bool
) -> dict[str, Any]:
    def ran(rate: float, seed: int) -> dict[str, Any] | None:
        return _run(goal, _settings(way, goal, rate, seed, quick))

    tried = {rate: ran(rate, _UNCOUNTED_SEED) for rate in rates}
    seconds = {rate: one["seconds"] for rate, one in tried.items() if one and one["seconds"]}
    best = min(seconds, key=seconds.__getitem__, default=None)
    runs = [one for seed in seeds if best and (one := ran(best, seed)) is not None]
    if not runs:
        return {"rate": best, "median_s": None, "seconds": [], "runs": []}
    took = [one["seconds"] for one in runs]
    reached = [one for one in took if one is not None]
    return {
        "rate": best,
        "median_s": median(reached) if len(reached) == len(seeds) else None,
        "seconds": took,
        "samples_per_s": fmean(one["samples_per_s"] for one in runs),
        "updates": dict(sum((Counter(one["updates"]) for one in runs), Counter())),
        "utilisation": {
            name: fmean(one["utilisation"][name] for one in runs) for name in runs[0]["utilisation"]
        },
        "runs": runs,
    }


def _settings(
    way: dict[str, Any], goal: Goal, rate: float, seed: int, quick: bool
) -> TrainSettings:
    on_cpu, on_gpu = (_QUICK_CPU_BATCH, _QUICK_GPU_BATCH) if quick else (_CPU_BATCH, _GPU_BATCH)
    options = {"policy": way["policy"], "cpu_batch": on_cpu, "gpu_batch": on_gpu}
    return settings(
        quick,
        workers=way["workers"],
        options=options,
        learning_rate=rate,
        seed=seed,
        batch_size=on_gpu[1],
        epochs=goal.epochs,
    )


def _run(goal: Goal, wanted: TrainSettings) -> dict[str, Any] | None:
    """Train until the goal is reached; None if the loss is no number."""
    try:
        with runner_of(wanted) as runner:
            outcome = trained(runner, lambda epoch: epoch.test_loss <= goal.loss)
    except InvalidInput as error:
        if not str(error).startswith("learning_rate: "):
            raise
        return None
    return _figures(goal, outcome)


def _figures(goal: Goal, outcome: Outcome) -> dict[str, Any]:
    assert outcome.updates is not None  # every run has updates
    return {
        "seconds": outcome.trained_s if outcome.epochs[-1].test_loss <= goal.loss else None,
        "epochs": len(outcome.epochs),
        "samples_per_s": outcome.samples_per_s,
        "updates": dict(outcome.updates.by_worker),
        "utilisation": dict(outcome.utilisation),
    }


def main() -> None:
    """Measure, print the table, and write gpu.json."""
    if not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here, so nothing is measured", file=sys.stderr)
        sys.exit(2)
    quick = "--quick" in sys.argv
    figures = {"gpu": measure(quick)}
    print(tables.of("gpu", figures["gpu"]), flush=True)
    if not quick:
        content = {"machine": facts(torch.device("cuda", 0)), "figures": figures}
        (HERE / "gpu.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
