"""Measure time and bytes of AlexNet steps with DistributedDataParallel, with and without hooks.

A case is a JSON object: `batch_size` per rank, `device` that paced layers emulate (None: layers
compute), names of `hooks`, number of `blocks`, and `steps` per block.
"""

import json
from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from paceline.core.cost import Roofline, compute_lane, layer_times
from paceline.links.group import Group
from paceline.records.machine_file import find_device
from paceline.training.recipes.named import workload_of
from ranks import compare
from steps import Task, alone, ddp, taken

FLOAT32, ALONE, FP16 = "DDP float32", "alone, nothing exchanged", "DDP, fp16_compress_hook"
_WRAPS = {ALONE: alone, FLOAT32: ddp(), FP16: ddp(25, fp16_compress_hook)}


def measure(group: Group, quick: bool, asked: str) -> dict[str, Any]:
    """Return seconds and bytes per step of all variants, as measured by this rank."""
    case = json.loads(asked)
    task = _task(case["device"], case["batch_size"], group)
    wraps = {name: _WRAPS[name] for name in (ALONE, FLOAT32, *case["hooks"])}
    found = taken(task, wraps, group, *((2, 1) if quick else (case["blocks"], case["steps"])))
    rows = compare(found.blocks, FLOAT32)
    for name, row in rows.items():
        row["wire_nbytes"] = found.sent_nbytes[name] + found.received_nbytes[name]
        row["samples"] = case["batch_size"] * group.world_size
    return rows


def _task(device: str | None, batch_size: int, group: Group) -> Task:
    if device is None:
        return Task.synthetic("alexnet", batch_size, group.device)
    known, workload = find_device(device), workload_of("alexnet", batch_size, None)
    rate = Roofline.of(known.machine).rates[compute_lane(known.device.name)]
    return Task.paced(workload, layer_times(workload, rate))
