"""Measure the time that two one-core hosts need to a lone host's loss.

All methods' steps are timed in turns, at 1 Gbit/s or 100 Mbit/s. The number of steps is known from
`steps_to_loss.py`, whose part must be measured first. For local updates with other rounds than the
timed ones, the step time is calculated: a step without exchange, and a share of an exchange.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from hosts import TwoHosts, on_hosts
from steps_to_loss import CASES, FREE, SHAPES, Shape, steps_needed
from ways import ALONE, SYNC_EVERY, local_name

from command import paceline
from figures import table

_HERE = Path(__file__).parent
WIRES = {"1gbit": "117 MB/s", "100mbit": "11.7 MB/s"}
_DDP = ("DDP 1 MB", "DDP 25 MB", "DDP, fp16 hook")
_CODECS = ("allreduce, dynamic8", "allreduce, dynamic4")  # if unmeasured, they need free's steps
_MACHINE = _HERE.parents[1] / "machines" / "two-hosts-gigabit.toml"


def measure(part: str, wire: str, quick: bool) -> dict[str, Any]:
    """Return step times by block, times to the loss, and the planned method."""
    known = _losses(part)
    with TwoHosts(wire) as hosts:
        blocks = on_hosts(hosts, _HERE, "ways", quick, (part,))
    rows = _rows(known, blocks)
    planned = _planned(part, wire, median(blocks[ALONE]), set(rows))
    return {"blocks": blocks, "num_steps": known["num_steps"], "rows": rows, "planned": planned}


def _planned(part: str, wire: str, alone_s: float, among: set[str]) -> str:
    """Return the timed method that a plan for this link ranks first."""
    case = CASES[part]
    speed = f"{case.batch_size / alone_s}/s@{case.batch_size}"
    with TemporaryDirectory() as folder:
        machine = Path(folder) / "hosts.toml"
        machine.write_text(_MACHINE.read_text().replace(WIRES["1gbit"], WIRES[wire]))
        asked = ("--machine", machine, "--measured", speed, "--workers", 2)
        sizes = ("--batch-size", 2 * case.batch_size)
        plans = paceline("plan", f"sized_gpt:{case.model}", *asked, *sizes, cwd=_HERE)["plans"]
    speeds: dict[str, float] = {}
    for plan in plans:
        known = plan["steps_to_loss"]
        if plan["workers"] == 2 and (plan["is_same_training"] or known is not None):
            speeds[_name(plan)] = plan["samples_per_s"] / (known["median"] if known else 1.0)
    return max(among & set(speeds), key=speeds.__getitem__)


def _name(plan: Mapping[str, Any]) -> str:
    if plan["strategy"] == "local":
        shape = Shape(*(plan["config"][name] for name in Shape._fields))
        return f"{shape.name}, {plan['codec'] or 'float32'}"
    if plan["strategy"] == "allreduce":
        return f"allreduce, {plan['codec']}" if plan["codec"] else _DDP[-2]
    return str(plan["strategy"])


def _losses(part: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((_HERE / "result.json").read_text())["figures"]
    if part not in figures:
        sys.exit(f"part {part} comes first")
    return figures[part]


def _rows(
    known: Mapping[str, Any], blocks: Mapping[str, Sequence[float]]
) -> dict[str, dict[str, Any]]:
    """Return each method's steps to the loss, seconds per step, and time to the loss."""
    alone = blocks[ALONE]
    ways = [("lone host", [known["num_steps"]] * len(known["lone"]), alone)]
    free = steps_needed(known["losses"][FREE], known["lone"])
    ways.append((FREE, free, alone))
    same = [name for name in (*_DDP, *_CODECS) if name not in known["losses"]]
    ways += [(name, free, blocks[name]) for name in same]
    for name, losses in known["losses"].items():
        needed = steps_needed(losses, known["lone"])
        if name.startswith("local"):
            for codec in (None, "dynamic8", "dynamic4"):
                step_s = _steps_of(SHAPES[name], codec, blocks)
                ways.append((f"{name}, {codec or 'float32'}", needed, step_s))
        elif name != FREE:
            ways.append((name, needed, blocks[name]))
    return {
        name: {
            "steps": median(needed),
            "step_s": median(seconds),
            "time_s": median(needed) * median(seconds),
            "seeds": needed,
        }
        for name, needed, seconds in ways
    }


def _steps_of(
    shape: Shape, codec: str | None, blocks: Mapping[str, Sequence[float]]
) -> list[float]:
    """Return the seconds per step in each block, for rounds of this shape.

    An exchange is assumed to add the same time as in the timed rounds. With a delay, it may add
    less: the delay is the same share of a longer round, and hides more of the exchange.
    """
    timed = blocks[local_name(codec, is_delayed=shape.delay > 0)]
    pairs = zip(blocks[ALONE], timed, strict=True)
    return [alone + max(0.0, own - alone) * SYNC_EVERY / shape.sync_every for alone, own in pairs]


def text(part: str, figures: dict[str, Any]) -> str:
    """Return the table of a part."""
    rows, lines = figures["rows"], []
    for name, row in rows.items():
        shares = (row["time_s"] / rows[other]["time_s"] for other in ("lone host", FREE))
        shown = f"{name} (planned)" if name == figures["planned"] else name
        steps, step_ms = f"{row['steps']:,.0f}", f"{1e3 * row['step_s']:.1f}"
        lines.append(
            (shown, steps, step_ms, f"{row['time_s']:,.1f}", *map("{:.2f}".format, shares))
        )
    head = (part, "steps to its loss", "ms a step", "s", "of the lone host's", "of free's")
    return table("", head, lines)
