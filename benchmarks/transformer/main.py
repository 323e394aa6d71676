"""A GPT on two ranks: tuned DistributedDataParallel beside what Paceline has, in the same run.

    python benchmarks/transformer/main.py [PART...] [--quick]

A part is a model and a wire: "gpt-10m loopback", "gpt-30m 1gbit"; or "checkpoints". The wires need
root, for two hosts in namespaces of their own. Without PART all are measured. With --quick a few
steps show that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE.parent / "network"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402

import parts  # noqa: E402
from figures import shown  # noqa: E402
from ranks import DEADLINE_S, on_ranks  # noqa: E402

_MODELS, _WIRES = ("gpt-10m", "gpt-30m"), ("loopback", "1gbit", "200mbit")
_CHECKPOINTS = "checkpoints"


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


def text(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a part."""
    if part == _CHECKPOINTS:
        rows = [f"| {name} | {shown(figures[name], 1e3, 0)} |" for name in ("step", "stall")]
        share = f"{figures['share_of_a_step']:.1%} of a step, of {figures['nbytes'] / 1e6:,.0f} MB"
        return "\n".join(["| gpt-30m, 2 ranks | ms |", "|---|---|", *rows, "", share])
    lines = [f"| {part} | ms a step | of tuned DDP's time |", "|---|---|---|"]
    rows = figures["variants"]
    best = min(row["seconds"]["median"] for name, row in rows.items() if name.startswith("DDP"))
    for name, row in sorted(rows.items(), key=lambda one: one[1]["seconds"]["median"]):
        own = row["seconds"]["median"]
        lines.append(f"| {name} | {shown(row['seconds'], 1e3, 0)} | {own / best:.3f} |")
    return "\n".join([*lines, "", f"auto: {figures['auto']}"])


if __name__ == "__main__":
    every = {
        f"{model} {wire}": partial(measure, model, wire) for model in _MODELS for wire in _WIRES
    }
    parts.run(HERE, every | {_CHECKPOINTS: stall}, text)
