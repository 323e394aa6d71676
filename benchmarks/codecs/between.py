"""Measure time and sent bytes of AlexNet steps with each codec, on two ranks.

Each rank has one core. The ranks are on two hosts with a link of 100 Mbit/s or 1 Gbit/s (needs
root), or on loopback.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hosts import TwoHosts, on_hosts
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from figures import shown, table
from paceline.links.group import Group
from paceline.planner import forecast
from paceline.planner.device_speed import DeviceRate, calibrated
from paceline.records.machine_file import find_machine
from paceline.strategies import find_exchange
from paceline.strategies.allreduce.config import AllReduce
from paceline.training.recipes.named import workload_of
from ranks import compare, on_ranks
from steps import Task, Wrap, alone, buckets, ddp, ours, taken

_HERE = Path(__file__).parent
_BATCH_SIZE = 16
_SETTLING = {"auto": 24}  # steps after which codec="auto" has decided
_WORKERS, _PAYLOAD = 2, 1448 / 1514  # TCP payload per byte of a frame; machine files count payload
_NBYTES_PER_S = {"100mbit": 1e8 / 8, "1gbit": 1e9 / 8}
# Planned variants, and the plan's codec. Our 16-bit casts are faster than torch's hook.
_PLANNED = {
    "DDP 25 MB": None,
    "DDP 25 MB, fp16_compress_hook": "half",
    "dynamic8": "dynamic8",
    "e3m0": "e3m0",
}
_CASES = {"100mbit": (3, 1), "1gbit": (5, 2), "loopback": (5, 2)}  # blocks, and steps per block


def part(rate: str, quick: bool) -> dict[str, Any]:
    """Return the figures for a link rate between two hosts, or for "loopback"."""
    if rate == "loopback":
        return on_ranks(_HERE, "between", _WORKERS, quick, case=rate)
    with TwoHosts(rate) as hosts:
        return on_hosts(hosts, _HERE, "between", quick, (rate,))


def measure(group: Group, quick: bool, rate: str) -> dict[str, Any]:
    """Return each variant's seconds and bytes, and why codec "auto" chose as it did."""
    task, turns = Task.synthetic("alexnet", _BATCH_SIZE, group.device), _CASES[rate]
    wraps = _wraps(rate, quick)
    found = taken(task, wraps, group, *((2, 1) if quick else turns), warm_up=_SETTLING)
    if group.rank:
        return {}
    rows = compare(found.blocks, "DDP 25 MB")
    for name, row in rows.items():
        row["sent_nbytes"] = found.sent_nbytes[name] or None
    auto: Any = found.trainees["auto"].parallel if "auto" in wraps else None
    return {"variants": rows, "auto": auto.hook_state.why if auto else None}


def _wraps(rate: str, quick: bool) -> dict[str, Wrap]:
    """Return the wrapper of each variant; the ranks of "apart" exchange nothing."""
    slow = rate == "100mbit"
    wraps: dict[str, Wrap] = {"apart": alone, **buckets((25,) if slow else (25, 100))}
    wraps["DDP 25 MB, fp16_compress_hook"] = ddp(25, fp16_compress_hook)
    for codec in ("dynamic8", "e3m0", *(() if slow or quick else ("auto",))):
        wraps[codec] = ddp(25, codec)
    if rate != "loopback":
        wraps["host, dynamic8"] = ours("host", codec="dynamic8", chunk=1)
    return wraps


def text(rate: str, figures: dict[str, Any]) -> str:
    """Return the table for a link rate or "loopback"."""
    rows = figures["variants"]
    plans = _planned_s(rate, rows)
    best = min(
        (row["seconds"]["median"], row["sent_nbytes"])
        for name, row in rows.items()
        if name.startswith("DDP") and "hook" not in name
    )
    half = min(row["seconds"]["median"] for name, row in rows.items() if "fp16" in name)
    lines = []
    for name, row in sorted(rows.items(), key=lambda one: one[1]["seconds"]["median"]):
        own = row["seconds"]["median"]
        sent = row["sent_nbytes"]
        share = f"{sent / 1e6:.1f} ({sent / best[1]:.3f} x)" if sent else "-"
        plan = plans.get(name)
        planned = "" if plan is None else f"{1e3 * plan:.0f} ({plan / own - 1:+.1%})"
        times = f"{best[0] / own:.2f}", f"{half / own:.2f}"
        lines.append((name, shown(row["seconds"], 1e3, 0), planned, *times, share))
    head = ("variant", "ms a step", "planned", "over the best DDP", "over the best fp16 hook")
    found = table("", (*head, "MB sent"), lines)
    return f"{found}\n\nauto: {figures['auto']}" if figures["auto"] else found


def _planned_s(rate: str, variants: Mapping[str, Any]) -> dict[str, float]:
    """Return the planned step seconds of the measured variants that can be planned.

    The planned devices compute as fast as the measured ranks without exchange. Empty for loopback.
    """
    if rate not in _NBYTES_PER_S:
        return {}
    described, strategy = partial(workload_of, "alexnet"), find_exchange("allreduce")
    alone = DeviceRate(_BATCH_SIZE / variants["apart"]["seconds"]["median"], _BATCH_SIZE)
    machine = calibrated(find_machine("two-hosts-gigabit"), described, alone, _BATCH_SIZE)
    linked = machine.with_each("links", bandwidth_bytes_per_s=_NBYTES_PER_S[rate] * _PAYLOAD)
    workload, samples = described(_BATCH_SIZE), _BATCH_SIZE * _WORKERS
    return {
        variant: forecast(
            workload, linked, strategy, AllReduce(workers=_WORKERS, codec=codec), samples
        ).step_s
        for variant, codec in _PLANNED.items()
        if variant in variants
    }
