"""How good the planner is: predicted, then carried out, configuration by configuration.

    python benchmarks/planner/main.py [loopback] [1gbit] [100mbit] [trained] [--quick]

Layers are paced as a GPU's, or trained in earnest; exchanges are real, over loopback or between two
hosts (which needs root). The prediction is the one that the run itself makes beforehand.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "network")]
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"

import tables  # noqa: E402
from cases import PARTS, Configuration  # noqa: E402
from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402

import parts  # noqa: E402

_DEADLINE_S = 400.0
Output = Callable[[list[str]], str]


def measure(part: str, quick: bool) -> list[dict[str, Any]]:
    """Return a row for each configuration of a part."""
    configurations = PARTS[part][:2] if quick else PARTS[part]
    if configurations[0].place == "loopback":
        return [_row(one, _here) for one in configurations]
    problem = missing()
    if problem:
        sys.exit(f"{part}: {problem}")
    with TwoHosts(configurations[0].place) as hosts:
        return [_row(one, partial(_on, hosts)) for one in configurations]


def _row(configuration: Configuration, output: Output) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        words = [*configuration.command, "--output", folder]
        result = json.loads(output([sys.executable, "-m", "paceline", *words]))
    kind = "measured" if configuration.device is None else "rehearsed"
    row = {
        "case": configuration.case,
        "way": configuration.name,
        "kind": kind,
        "predicted_s": result["predicted_step_s"],
        "step_s": result["step_s"],
        "range_share": _range_share(result),
        "quartiles_s": [result.get("lower_quartile_s"), result.get("upper_quartile_s")],
    }
    error = row["predicted_s"] / row["step_s"] - 1
    shown = f"{1e3 * row['predicted_s']:9.2f} {1e3 * row['step_s']:9.2f} {error:+7.1%}"
    print(f"{shown}  {row['case']}: {row['way']}", file=sys.stderr, flush=True)
    return row


def _range_share(result: dict[str, Any]) -> float:
    """Return the range of the plan whose step was predicted."""
    plans = [one for one in result["plans"] if one["step_s"] == result["predicted_step_s"]]
    share: float = plans[0]["range_share"]
    return share


def _here(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def _on(hosts: TwoHosts, command: list[str]) -> str:
    finished = hosts.run(command, cores=(0, 1), deadline_s=_DEADLINE_S)
    if any(one.code for one in finished):
        sys.exit("\n".join(one.err for one in finished))
    return finished[0].out


if __name__ == "__main__":
    parts.run(HERE, {name: partial(measure, name) for name in PARTS}, tables.of)
