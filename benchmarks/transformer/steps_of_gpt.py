"""Steps of a GPT on two ranks, one core each, exchanged in different ways."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import DataParallel, ddp_hook
from paceline.links.group import Group
from ranks import DEADLINE_S, Variant, alternate, compare, timed
from trainee import Task, Trainee, Wrap

_BATCH_SIZE = {"gpt-10m": 2, "gpt-30m": 1}  # windows of 256 and of 512 tokens a rank
_SETTLING, _NUM_WARM_UP = 42, 2  # steps: after the first `auto` has decided
_NUM_BLOCKS, _NUM_STEPS = 5, 2


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Return the seconds of all variants, and why `auto` has decided as it has."""
    task = Task.synthetic(case, _BATCH_SIZE[case], group.device)
    variants, why = [], ""
    for name, wrap in _wraps(quick).items():
        trainee = Trainee(task, wrap)
        for _ in range(_SETTLING if name == "auto" and not quick else _NUM_WARM_UP):
            trainee.step()
        if isinstance(trainee.parallel, DataParallel) and name == "auto":
            why = str(trainee.parallel.why)
        variants.append(Variant(name, timed(trainee.step), group.world_size))
    blocks = alternate(variants, group, 2 if quick else _NUM_BLOCKS, 1 if quick else _NUM_STEPS)
    rows = compare(blocks, "DDP 25 MB") if group.rank == 0 else {}
    return {"variants": rows, "auto": why, "tokens": int(torch.numel(task.inputs))}


def _wraps(quick: bool) -> dict[str, Wrap]:
    ours = partial(DataParallel, deadline_s=DEADLINE_S, gradient_as_bucket_view=True)
    ddp = {f"DDP {mb} MB": partial(_distributed, mb) for mb in ((25,) if quick else (10, 25, 100))}
    return {
        **ddp,
        "host": partial(ours, exchange="host", chunk=1),
        "dynamic8": _encoded,
        "host, dynamic8": partial(ours, exchange="host", codec="dynamic8", chunk=1),
        "auto": partial(ours, exchange="auto"),
    }


def _distributed(mb: int, model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True)


def _encoded(model: nn.Module) -> DistributedDataParallel:
    parallel = _distributed(25, model)
    parallel.register_comm_hook(*ddp_hook("dynamic8"))
    return parallel
