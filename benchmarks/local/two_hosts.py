"""Compare strategy local with DistributedDataParallel: GPT of ten million parameters, two hosts.

Each turn first measures steps without exchange, on both hosts at once, and steps of
DistributedDataParallel. Then `paceline train` runs whole rounds of local, between measurements of
steps without exchange. "times a lone host" is the median over turns.
"""

from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from hosts import TwoHosts, on_hosts
from ways import ALONE, BATCH_SIZE, BUILT_IN

from command import paceline
from figures import shown, spread, table

_HERE = Path(__file__).parent
PART = "gpt-10m 1gbit"
_SYNC_EVERY, _NUM_ROUNDS, _REPEATS = 50, 3, 2
_LOCALS: dict[str, dict[str, Any]] = {
    "local": {},
    "local, dynamic8, streaming": {"codec": "dynamic8", "fragments": 2, "delay": 5},
}


def measure(quick: bool) -> dict[str, Any]:
    """Return the step times of each method between two hosts."""
    seconds: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)  # speed relative to a lone host, by turn
    predicted: dict[str, list[float]] = defaultdict(list)
    with TwoHosts("1gbit") as hosts:
        for _ in range(1 if quick else _REPEATS):
            found = on_hosts(hosts, _HERE, "ways", quick, (BUILT_IN,))
            before = found["blocks"][ALONE]
            for name, own in found["blocks"].items():
                seconds[name] += own
                times[name].append(2 * median(before) / median(own))
            for name, options in _LOCALS.items():
                own, step_s = _local(hosts, options, quick)
                alone = on_hosts(hosts, _HERE, "ways", quick, (BUILT_IN, ALONE))
                after = alone["blocks"][ALONE]
                seconds[name] += own
                seconds[ALONE] += after
                # The machine's speed drifts: compare with the steps just before and after.
                times[name].append(2 * median([*before, *after]) / median(own))
                predicted[name].append(step_s / median(own) - 1)
                before = after
    rows = {
        name: {
            "seconds": spread(own),
            "times_alone": 1.0 if name == ALONE else median(times[name]),
            "turns": times[name],
            **({"predicted": predicted[name]} if name in predicted else {}),
        }
        for name, own in seconds.items()
    }
    return {"ways": rows, "sync_every": 4 if quick else _SYNC_EVERY, "tokens": found["tokens"]}


def _local(hosts: TwoHosts, options: dict[str, Any], quick: bool) -> tuple[list[float], float]:
    """Return the quartiles of the rounds' mean step seconds, and the predicted step seconds."""
    every = 4 if quick else _SYNC_EVERY
    own = {**options, "sync_every": every, **({"delay": 1} if quick and options else {})}
    sizes = ("--batch-size", 2 * BATCH_SIZE, "--steps", every * _NUM_ROUNDS)
    settings = [
        word for name, value in own.items() for word in ("--strategy-option", f"{name}={value}")
    ]
    result = paceline(
        *("train", BUILT_IN, "--strategy", "local", "--workers", 2, *sizes, *settings),
        *("--checkpoint-every", "never", "--profile-s", 1 if quick else 10),
        hosts=hosts,
    )
    quartiles = [result[f"{name}_s"] for name in ("lower_quartile", "step", "upper_quartile")]
    return quartiles, result["predicted_step_s"]


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    lines = []
    for name, row in figures["ways"].items():
        seconds, turns = row["seconds"], sorted(row["turns"])
        rate = (1 if name == ALONE else 2) * figures["tokens"] / seconds["median"]
        between = f" [{turns[0]:.2f}, {turns[-1]:.2f}]" if len(turns) > 1 and name != ALONE else ""
        told = " ".join(f"{error:+.1%}" for error in row.get("predicted", ()))
        times = f"{row['times_alone']:.2f}{between}"
        lines.append((name, shown(seconds, 1e3, 0), f"{rate:,.0f}", times, told))
    return table("", (PART, "ms a step", "tokens/s", "times a lone host", "predicted"), lines)
