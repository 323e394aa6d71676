"""Measure GPT steps on two one-core ranks with different gradient exchanges."""

from typing import Any

import torch

from paceline.links.group import Group
from ranks import compare
from steps import Task, buckets, ddp, ours, taken

_BATCH_SIZE = {"gpt-10m": 2, "gpt-30m": 1}  # per rank: windows of 256 and of 512 tokens
_NUM_BLOCKS, _NUM_STEPS = 5, 2


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Return the step times of all variants, and the reason for `auto`'s choice."""
    task = Task.synthetic(case, _BATCH_SIZE[case], group.device)
    wraps = {
        **buckets(*([(25,)] if quick else [])),
        "host": ours("host", chunk=1),
        "dynamic8": ddp(25, "dynamic8"),
        "host, dynamic8": ours("host", codec="dynamic8", chunk=1),
        "auto": ours("auto"),
    }
    turns, warm_up = ((2, 1), {"auto": 2}) if quick else ((_NUM_BLOCKS, _NUM_STEPS), {})
    found = taken(task, wraps, group, *turns, warm_up=warm_up)
    rows = compare(found.blocks, "DDP 25 MB") if group.rank == 0 else {}
    why = str(getattr(found.trainees["auto"].parallel, "why", ""))
    return {"variants": rows, "auto": why, "tokens": int(torch.numel(task.inputs))}
