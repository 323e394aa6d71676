"""Compare the samples/s of `hogbatch` on CPU+GPU and GPU alone.

One worker on all CPU cores but two, and one on GPU 0, train the covtype network, with the batch
sizes of Ma, Rusu et al. 2020, table II: 1 to 64 samples per thread, 64 to 8192 on the GPU.
"""

import os

from part import Part

from command import paceline
from figures import shown, spread
from papers.lookalike import covtype_like

_FREE_CORES = 2  # for the coordinator and the process that feeds the GPU
_REPEATS, _NUM_SAMPLES = 2, 125_000
_EPOCHS = {"GPU alone": 40, "CPU+GPU": 30, "adaptive": 2}  # some seconds of training


def run(part: Part) -> None:
    """Train each variant for some seconds."""
    cores = max(1, len(os.sched_getaffinity(0)) - _FREE_CORES)
    both = f"cpu:{cores},gpu:0"
    batches = {"cpu_batch": "[1, 16]" if part.smoke else "[1, 64]"}
    batches["gpu_batch"] = "[16, 256]" if part.smoke else "[64, 8192]"
    network = "mlp-64-128-10" if part.smoke else "covtype-mlp"
    data = "digits" if part.smoke else covtype_like(_NUM_SAMPLES)
    for name, epochs in _EPOCHS.items():
        policy = "adaptive" if name == "adaptive" else "cpu_gpu"
        options = {"policy": policy, **batches}
        runs = [
            paceline(
                *("train", network, "--data", data, "--strategy", "hogbatch"),
                *("--workers", "gpu:0" if name == "GPU alone" else both),
                *(f"--strategy-option={key}={value}" for key, value in options.items()),
                *("--batch-size", 256 if part.smoke else 8192, "--momentum", 0),
                *("--learning-rate", 0.1, "--epochs", 1 if part.smoke else epochs),
                *("--profile-s", 0.1 if part.smoke else 1, "--checkpoint-every", "never"),
            )
            for _ in range(1 if part.smoke else _REPEATS)
        ]
        kept = [{key: one[key] for key in ("samples_per_s", "utilisation")} for one in runs]
        samples_per_s = spread([one["samples_per_s"] for one in kept])
        busy = ", ".join(f"{who} {one:.0%}" for who, one in kept[0]["utilisation"].items())
        line = f"{shown(samples_per_s, 1, 0)} samples/s, busy: {busy}"
        part.keep(name, {"samples_per_s": samples_per_s, "runs": kept}, line)
