"""Two hosts at 1 Gbit/s, one of which is four times slower: local updates beside the fast one.

    python benchmarks/local/uneven.py [--quick]

It needs root, for two hosts in namespaces of their own. A GPT of a million parameters
(sized_gpt.py) trains on the fast host alone, and on both, where the slow host takes a quarter of
the steps in each round. Runs of two lengths, each with a schedule of its own length, tell when both
reach the lone host's loss. With --quick a few steps show that everything works; the figures mean
nothing, and are not written.
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
from steps_to_loss import steps_needed  # noqa: E402
from uneven_runs import ALONE  # noqa: E402

import parts  # noqa: E402


def measure(quick: bool) -> dict[str, Any]:
    """Return the runs of the fast host and of both, in turns."""
    if problem := missing():
        sys.exit(problem)
    with TwoHosts("1gbit") as hosts:
        return on_hosts(hosts, HERE, "uneven_runs", quick)


def text(_: str, figures: dict[str, Any]) -> str:
    """Return the table."""
    alone, *both = figures.values()
    speeds = [one["tokens"] / one["seconds"] for one in alone]
    lines = ["| gpt-1m, 1 Gbit/s, 4:1 | steps | tokens/s | times the fast host | s | test loss |"]
    lines += ["|---" * 6 + "|"]
    for name, own in figures.items():
        times = sorted(
            one["tokens"] / one["seconds"] / speed for one, speed in zip(own, speeds, strict=True)
        )
        between = f" [{times[0]:.2f}, {times[-1]:.2f}]" if name != ALONE else ""
        losses = " ".join(f"{one['loss']:.3f}" for one in own)
        lines.append(
            f"| {name} | {own[0]['steps']} "
            f"| {median(one['tokens'] / one['seconds'] for one in own):,.0f} "
            f"| {median(times):.2f}{between} | {median(one['seconds'] for one in own):.1f} "
            f"| {losses} |"
        )
    losses = {str(own[0]["steps"]): [one["loss"] for one in own] for own in both}
    needed = steps_needed(losses, [one["loss"] for one in alone])
    step_s = [
        median(own[seed]["seconds"] / own[seed]["steps"] for own in both)
        for seed in range(len(alone))
    ]
    parts_of = [
        steps * seconds / one["seconds"]
        for steps, seconds, one in zip(needed, step_s, alone, strict=True)
    ]
    told = ", ".join("not reached" if one == float("inf") else f"{one:.2f}" for one in parts_of)
    return "\n".join([*lines, "", f"Time of both to the fast host's loss, beside its own: {told}."])


if __name__ == "__main__":
    parts.run(HERE, {"uneven": measure}, text)
