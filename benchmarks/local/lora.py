"""LoRA on two hosts at 1 Gbit/s, one of which is four times slower, beside the fast one alone.

    python benchmarks/local/lora.py [--quick]

It needs root, for two hosts in namespaces of their own. A small GPT-2 learns the text of Python's
library; its adapters then learn torch's C++ headers, in a loop with PEFT and LocalUpdates. The slow
host takes a quarter of the steps in each round. With --quick a few steps show that everything
works; the figures mean nothing, and are not written.
"""

import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
sys.path.append(str(HERE.parent / "network"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402
from rank_figures import on_hosts  # noqa: E402

import parts  # noqa: E402


def measure(quick: bool) -> dict[str, Any]:
    """Return the runs of the fast host and of both, in turns, and the exchanges' bytes and time."""
    if problem := missing():
        sys.exit(problem)
    with TwoHosts("1gbit") as hosts:
        return on_hosts(hosts, HERE, "lora_runs", quick)


def text(_: str, figures: dict[str, Any]) -> str:
    """Return the tables."""
    runs = figures["runs"]
    alone = [one["tokens"] / one["seconds"] for one in runs["the fast host alone"]]
    lines = ["| LoRA, 4:1 | tokens/s | times the fast host | s | test loss |", "|---" * 5 + "|"]
    for name, own in runs.items():
        speeds = [one["tokens"] / one["seconds"] for one in own]
        times = sorted(speed / other for speed, other in zip(speeds, alone, strict=True))
        between = f" [{times[0]:.2f}, {times[-1]:.2f}]" if len(times) > 1 else ""
        losses = " ".join(f"{one['loss']:.3f}" for one in own)
        seconds = median(one["seconds"] for one in own)
        lines.append(
            f"| {name} | {median(speeds):,.0f} | {median(times):.2f}{between} | {seconds:.1f} "
            f"| {losses} |"
        )
    lines += ["", "| exchange at 1 Gbit/s | values | bytes sent | ms |", "|---" * 4 + "|"]
    for name, own in figures["exchanges"].items():
        lines.append(
            f"| {name} | {own['values']:,} | {own['nbytes']:,} | {1e3 * own['seconds']:.1f} |"
        )
    return "\n".join([*lines, "", f"Test loss before fine-tuning {figures['before']:.3f}."])


if __name__ == "__main__":
    parts.run(HERE, {"lora": measure}, text)
