"""Measure codecs on two hosts at a link rate (needs root), or on loopback."""

from pathlib import Path
from typing import Any

import pays
from hosts import TwoHosts, on_hosts

from figures import shown, table
from ranks import on_ranks

_HERE, _PART = Path(__file__).parent, "between"


def measure(rate: str, quick: bool) -> dict[str, Any]:
    """Return the figures for a link rate between two hosts, or for "loopback"."""
    if rate == "loopback":
        return on_ranks(_HERE, _PART, 2, quick, case=rate)
    with TwoHosts(rate) as hosts:
        return on_hosts(hosts, _HERE, _PART, quick, (rate,))


def text(rate: str, figures: dict[str, Any]) -> str:
    """Return the table for a link rate or "loopback"."""
    rows = figures["variants"]
    plans = pays.planned_s(rate, rows)
    ddp = min(
        (row["seconds"]["median"], row["sent_nbytes"])
        for name, row in rows.items()
        if name.startswith("DDP") and "hook" not in name
    )
    half = min(row["seconds"]["median"] for name, row in rows.items() if "fp16" in name)
    lines = []
    for name, row in sorted(rows.items(), key=lambda one: one[1]["seconds"]["median"]):
        own = row["seconds"]["median"]
        sent = row["sent_nbytes"]
        share = f"{sent / 1e6:.1f} ({sent / ddp[1]:.3f} x)" if sent else "-"
        plan = plans.get(name)
        planned = "" if plan is None else f"{1e3 * plan:.0f} ({plan / own - 1:+.1%})"
        times = f"{ddp[0] / own:.2f}", f"{half / own:.2f}"
        lines.append((name, shown(row["seconds"], 1e3, 0), planned, *times, share))
    head = ("variant", "ms a step", "planned", "over the best DDP", "over the best fp16 hook")
    found = table("", (*head, "MB sent"), lines)
    return f"{found}\n\nauto: {figures['auto']}" if figures["auto"] else found
