"""Compare the samples/s of `hogbatch` on CPU+GPU and GPU alone.

One worker on all CPU cores but two, and one on GPU 0, train the covtype network for some seconds,
with the batch sizes of Ma, Rusu et al. 2020, table II: 1 to 64 samples per thread, 64 to 8192 on
the GPU.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

from part import Part

from figures import shown, spread
from paceline.links.forkserver import open_server
from paceline.links.processes import KEEPING_MEMORY

sys.path.append(str(Path(__file__).parents[2] / "hogbatch"))

from cases import runner_of, settings, trained

_RATE = 0.1  # small, so that the loss stays finite
_BATCHES = {"cpu_batch": (1, 64), "gpu_batch": (64, 8192)}
_SMOKE_BATCHES = {"cpu_batch": (1, 16), "gpu_batch": (16, 256)}
_EPOCHS, _SMOKE_EPOCHS = 100, 1  # a GPU alone makes few updates in each
_PROFILE_S, _SMOKE_PROFILE_S = 1.0, 0.1
_FREE_CORES = 2  # for the coordinator and the process that feeds the GPU
_REPEATS, _RUN_S = 3, 3.0  # runs of a variant, and the limit of one run's training
_WORKER = "paceline.strategies.hogbatch.worker"


def run(part: Part) -> None:
    """Train each variant for some seconds."""
    cores = max(1, len(os.sched_getaffinity(0)) - _FREE_CORES)
    both = f"cpu:{cores},gpu:0"
    ways = {"GPU alone": ("gpu:0", "cpu_gpu"), "CPU+GPU": (both, "cpu_gpu")}
    ways["adaptive"] = both, "adaptive"
    repeats = 1 if part.smoke else _REPEATS
    # Workers require this environment, and a fork server with another one does not fork them.
    with open_server([_WORKER], KEEPING_MEMORY | os.environ | {"OMP_NUM_THREADS": "1"}):
        for name, (workers, policy) in ways.items():
            found = [_trained(workers, policy, part.smoke) for _ in range(repeats)]
            samples_per_s = spread([one["samples_per_s"] for one in found])
            busy = ", ".join(f"{who} {one:.0%}" for who, one in found[0]["utilisation"].items())
            line = f"{shown(samples_per_s, 1, 0)} samples/s, busy: {busy}"
            part.keep(name, {"samples_per_s": samples_per_s, "runs": found}, line)


def _trained(workers: str, policy: str, smoke: bool) -> dict[str, Any]:
    """Train until the time limit; return the speed, the loss and each worker's part."""
    batches = _SMOKE_BATCHES if smoke else _BATCHES
    wanted = settings(
        smoke,
        workers=workers,
        options={"policy": policy, **batches},
        learning_rate=_RATE,
        batch_size=batches["gpu_batch"][1],
        epochs=_SMOKE_EPOCHS if smoke else _EPOCHS,
        profile_s=_SMOKE_PROFILE_S if smoke else _PROFILE_S,
    )
    with runner_of(wanted) as runner:
        until = time.monotonic() + _RUN_S
        outcome = trained(runner, lambda _: time.monotonic() > until)
    return {
        "samples_per_s": outcome.samples_per_s,
        "loss": outcome.epochs[-1].test_loss,
        "updates": dict(outcome.updates.by_worker),
        "utilisation": dict(outcome.utilisation),
    }
