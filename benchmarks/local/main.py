"""Two hosts of one core each on a slow wire: strategy local beside gradients in each step.

    python benchmarks/local/main.py [PART...] [--quick]

A part is a model and a wire: "gpt-10m 1gbit", "gpt-30m 100mbit". They need root, for two hosts in
namespaces of their own. In each turn of a part steps are measured alone on both hosts at
once, and by DistributedDataParallel; then `paceline train` with local, whole rounds of it, with
steps alone before and after it. Times a lone host are the median of the turns' own. With --quick a
few steps show that everything works; the figures mean nothing, and are not written.
"""

import json
import os
import sys
import tempfile
from collections import defaultdict
from functools import partial
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
from steps_of_hosts import ALONE, BATCH_SIZE  # noqa: E402

import parts  # noqa: E402
from figures import shown, spread  # noqa: E402
from ranks import DEADLINE_S  # noqa: E402

_MODELS, _WIRES = ("gpt-10m", "gpt-30m"), ("1gbit", "100mbit")
_TRAINED = {"gpt-30m": "even_gpt:recipe"}
_SYNC_EVERY, _NUM_ROUNDS = 50, 3
_REPEATS = {"gpt-10m": 2, "gpt-30m": 1}
_LOCALS = {
    "local": {},
    "local, dynamic8, streaming": {"codec": "dynamic8", "fragments": 2, "delay": 5},
}


def measure(model: str, wire: str, quick: bool) -> dict[str, Any]:
    """Return the seconds of a step of each way of training between two hosts."""
    if problem := missing():
        sys.exit(f"{wire}: {problem}")
    seconds: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)  # a lone host's speed, in each turn
    predicted: dict[str, list[float]] = defaultdict(list)
    alone = (f"{model} {ALONE}",)
    with TwoHosts(wire) as hosts:
        for _ in range(1 if quick else _REPEATS[model]):
            found = on_hosts(hosts, HERE, "steps_of_hosts", quick, (f"{model} ",))
            before = found["seconds"][ALONE]
            for name, own in found["seconds"].items():
                seconds[name] += own
                times[name].append(2 * median(before) / median(own))
            for name, options in _LOCALS.items():
                own, step_s = _local(hosts, model, options, quick)
                after = on_hosts(hosts, HERE, "steps_of_hosts", quick, alone)["seconds"][ALONE]
                seconds[name] += own
                seconds[ALONE] += after
                # The machine's speed changes within minutes: what ran just before and after tells.
                times[name].append(2 * median([*before, *after]) / median(own))
                predicted[name].append(step_s / median(own) - 1)
                before = after
    rows: dict[str, dict[str, Any]] = {
        name: {
            "seconds": spread(own * (4 if quick else 1)),
            "times_alone": 1.0 if name == ALONE else median(times[name]),
            "turns": times[name],
        }
        for name, own in seconds.items()
    }
    for name, errors in predicted.items():
        rows[name]["predicted"] = errors
    known = {"sync_every": 4 if quick else _SYNC_EVERY, "tokens": found["tokens"]}
    return {"ways": rows, **known}


def _local(
    hosts: TwoHosts, model: str, options: dict[str, Any], quick: bool
) -> tuple[list[float], float]:
    """Return the quartiles of a step's seconds over the rounds but the first, and as predicted."""
    every = 4 if quick else _SYNC_EVERY
    own = {**options, "sync_every": every, **({"delay": 1} if quick and options else {})}
    asked = ["--strategy", "local", "--workers", "2", "--json", "--checkpoint-every", "never"]
    asked += [f"--batch-size={2 * BATCH_SIZE[model]}", f"--steps={every * _NUM_ROUNDS}"]
    asked += [word for name, value in own.items() for word in ("--set", f"{name}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        asked += ["--output", folder, "--profile-s", "1" if quick else "10"]
        _run(hosts, [sys.executable, "-m", "paceline", "train", _TRAINED.get(model, model), *asked])
        (path,) = Path(folder).glob("*/result.json")
        result = json.loads(path.read_text())
    quartiles = [result[f"{name}_s"] for name in ("lower_quartile", "step", "upper_quartile")]
    return quartiles, result["predicted_step_s"]


def _run(hosts: TwoHosts, command: list[str]) -> None:
    environment = {"PYTHONPATH": str(HERE)}
    finished = hosts.run(
        command, environment=environment, cores=(0, 1), cwd=HERE, deadline_s=10 * DEADLINE_S
    )
    if any(one.code for one in finished):
        sys.exit("\n".join(one.err for one in finished))


def text(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a part."""
    lines = [f"| {part} | ms a step | tokens/s | times a lone host | predicted |", "|---" * 5 + "|"]
    for name, row in figures["ways"].items():
        seconds = row["seconds"]
        rate = (1 if name == ALONE else 2) * figures["tokens"] / seconds["median"]
        turns = sorted(row["turns"])
        between = f" [{turns[0]:.2f}, {turns[-1]:.2f}]" if len(turns) > 1 and name != ALONE else ""
        told = " ".join(f"{error:+.1%}" for error in row.get("predicted", ()))
        times = f"{row['times_alone']:.2f}{between}"
        lines.append(f"| {name} | {shown(seconds, 1e3, 0)} | {rate:,.0f} | {times} | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    every_part = {
        f"{model} {wire}": partial(measure, model, wire) for model in _MODELS for wire in _WIRES
    }
    parts.run(HERE, every_part, text)
