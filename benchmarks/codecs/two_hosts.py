"""Two hosts at 100 Mbit/s and 1 Gbit/s, and two ranks on loopback: needs root, for the hosts."""

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "network"))

import pays  # noqa: E402
from host import missing  # noqa: E402
from hosts import TwoHosts  # noqa: E402
from rank_figures import on_hosts  # noqa: E402

from figures import shown  # noqa: E402
from ranks import on_ranks  # noqa: E402

_PART = "between"


def measure(rate: str, quick: bool) -> dict[str, Any]:
    """Return the figures of a rate: that of a wire between two hosts, or "loopback"."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RATE"] = rate
    if rate == "loopback":
        return on_ranks(HERE, _PART, 2, quick)
    problem = missing()
    if problem:
        sys.exit(f"{rate}: {problem}")
    with TwoHosts(rate) as hosts:
        return on_hosts(hosts, HERE, _PART, quick)


def text(rate: str, figures: dict[str, Any]) -> str:
    """Return the table of a rate."""
    rows = figures["variants"]
    plans = pays.planned_s(rate, rows)
    ddp = min(
        (row["seconds"]["median"], row["sent_nbytes"])
        for name, row in rows.items()
        if name.startswith("DDP") and "hook" not in name
    )
    half = min(row["seconds"]["median"] for name, row in rows.items() if "fp16" in name)
    lines = [
        "| variant | ms a step | planned | over the best DDP | over the best fp16 hook | MB sent |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in sorted(rows.items(), key=lambda one: one[1]["seconds"]["median"]):
        own = row["seconds"]["median"]
        sent = row["sent_nbytes"]
        share = f"{sent / 1e6:.1f} ({sent / ddp[1]:.3f} x)" if sent else "-"
        plan = plans.get(name)
        planned = "" if plan is None else f"{1e3 * plan:.0f} ({plan / own - 1:+.1%})"
        lines.append(
            f"| {name} | {shown(row['seconds'], 1e3, 0)} | {planned} | {ddp[0] / own:.2f} "
            f"| {half / own:.2f} | {share} |"
        )
    if figures["auto"]:
        lines += ["", f"auto: {figures['auto']}"]
    return "\n".join(lines)
