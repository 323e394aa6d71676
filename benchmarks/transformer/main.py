"""A GPT on two ranks: tuned DistributedDataParallel beside what Paceline has, in the same run.

    python benchmarks/transformer/main.py [PART...] [--quick]

A part is a model and a wire: "gpt-10m loopback", "gpt-30m 1gbit"; "checkpoints", or "ten minutes".
The wires need root, for two hosts in namespaces of their own. Without PART all are measured. With
--quick a few steps show that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
sys.path.append(str(HERE.parent / "network"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

import tables  # noqa: E402
from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402

import parts  # noqa: E402
from ranks import DEADLINE_S, on_ranks  # noqa: E402

_MODELS, _WIRES = ("gpt-10m", "gpt-30m"), ("loopback", "1gbit", "200mbit")


def measure(model: str, wire: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a model whose ranks are joined by this wire, or by shared memory."""
    if wire == "loopback":
        return on_ranks(HERE, "steps_of_gpt", 2, quick, case=model)
    if problem := missing():
        sys.exit(f"{wire}: {problem}")
    with tempfile.TemporaryDirectory() as folder, TwoHosts(wire) as hosts:
        output = Path(folder) / "figures.json"
        program = [sys.executable, str(HERE.parent / "rank.py"), str(HERE), "steps_of_gpt"]
        options = [str(output), f"--case={model}", *(["--quick"] if quick else [])]
        finished = hosts.run([*program, *options], cores=(0, 1), deadline_s=10 * DEADLINE_S)
        if any(one.code for one in finished):
            sys.exit("\n".join(one.err for one in finished))
        figures: dict[str, Any] = json.loads(output.read_text())
    return figures


def stall(quick: bool) -> dict[str, Any]:
    """Return how long a checkpoint of a GPT holds training, beside its step."""
    return on_ranks(HERE, "checkpoints_of_gpt", 2, quick)


def ten_minutes(quick: bool) -> dict[str, Any]:
    """Return the bits per byte of `gpt` while it trains: here some ten minutes."""
    steps, every = (4, 2) if quick else (800, 100)
    command = [sys.executable, "-m", "paceline", "train", "gpt", "--strategy=host", "--workers=2"]
    command += ["--batch-size=16", f"--steps={steps}", f"--evaluate-every={every}"]
    command += ["--schedule=cosine", f"--warmup-steps={steps // 16}"]
    with tempfile.TemporaryDirectory() as folder:
        command += [f"--checkpoint-every={every}", f"--output={folder}", "--json"]
        subprocess.run(command, check=True, timeout=10 * DEADLINE_S, stdout=subprocess.PIPE)
        (path,) = Path(folder).glob("*/result.json")
        return curve_of(json.loads(path.read_text()))


def curve_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a run's result."""
    curve = [[one["num_steps"], one["score"]] for one in result["evaluations"]]
    seconds = sum(epoch["seconds"] for epoch in result["epochs"])
    speeds = {name: result[name] for name in ("step_s", "tokens_per_s")}
    return {"curve": curve, "seconds": seconds, **speeds}


if __name__ == "__main__":
    every = {
        f"{model} {wire}": partial(measure, model, wire) for model in _MODELS for wire in _WIRES
    }
    parts.run(HERE, every | {tables.CHECKPOINTS: stall, tables.TEN_MINUTES: ten_minutes}, tables.of)
