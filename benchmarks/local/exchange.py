"""Bytes of an exchange between two hosts beside the plan's, and the part that `delay` hides.

    python benchmarks/local/exchange.py [--quick]

It needs root, for two hosts in namespaces of their own, at 1 Gbit/s. A GPT of ten million
parameters takes rounds of ten steps with two fragments, which travel beside three steps. Bytes are
counted by LocalUpdates, and by the kernel as whole frames. With --quick a few steps show that
everything works; the figures mean nothing, and are not written.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
sys.path.append(str(HERE.parent / "network"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # GPUs are for benchmarks/gpu
os.environ["OMP_NUM_THREADS"] = "1"

from exchanges import DELAY, FRAGMENTS, SYNC_EVERY  # noqa: E402
from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402
from rank_figures import on_hosts  # noqa: E402
from steps_to_loss import CASES  # noqa: E402

import parts  # noqa: E402

_CASE = "10m"
_CODECS = (None, "dynamic8", "dynamic4")


def measure(quick: bool) -> dict[str, Any]:
    """Return the bytes of a round as planned, sent and counted, and the hidden share."""
    if problem := missing():
        sys.exit(problem)
    case = "0.1m" if quick else _CASE
    found: dict[str, Any] = {}
    with TwoHosts("1gbit") as hosts:
        for codec in _CODECS:
            own = on_hosts(hosts, HERE, "exchanges", quick, (case, codec or ""))
            found[codec or "float32"] = {**own, "planned_nbytes": _planned(case, codec)}
    return found


def _planned(case: str, codec: str | None) -> float:
    """Return the bytes that a host sends in a round by `paceline plan`."""
    command = [sys.executable, "-m", "paceline", "plan", f"sized_gpt:{CASES[case].model}", "--json"]
    command += ["--machine=two-hosts-gigabit", "--workers=2", "--strategy=local"]
    command += [f"--batch-size={2 * CASES[case].batch_size}", f"--set=sync_every={SYNC_EVERY}"]
    command += [f"--set=fragments={FRAGMENTS}", f"--set=delay={DELAY}"]
    command += [f"--set=codec={codec}"] if codec else []
    finished = subprocess.run(command, cwd=HERE, check=True, stdout=subprocess.PIPE)
    plans = json.loads(finished.stdout)["plans"]
    (own,) = (one for one in plans if one["workers"] == 2 and one["codec"] == codec)
    return float(own["wire_nbytes_per_step"]) * SYNC_EVERY


def text(_: str, figures: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        "| travels as | bytes a round, planned | sent | beside the plan | frames | hidden |",
        "|---" * 6 + "|",
    ]
    for name, own in figures.items():
        planned, sent = own["planned_nbytes"], own["nbytes"]
        lines.append(
            f"| {name} | {planned:,.0f} | {sent:,.0f} | {sent / planned - 1:+.1%} "
            f"| {own['frames_nbytes']:,.0f} | {own['hidden_share']:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parts.run(HERE, {"exchange": measure}, text)
