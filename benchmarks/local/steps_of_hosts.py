"""Steps of a GPT on two hosts of one core each: alone, and exchanging gradients in each step."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline import ddp_hook
from paceline.links.group import Group
from ranks import Variant, alternate, timed
from trainee import Task, Trainee, Wrap

BATCH_SIZE = {"gpt-10m": 2, "gpt-30m": 1}  # windows of 256 and of 512 tokens a worker
ALONE = "alone"
_NUM_WARM_UP = 2
_NUM_BLOCKS, _NUM_STEPS = 3, 2


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Return the seconds of the steps of all variants, in blocks that take turns.

    `case` is a model, and a variant if it is to be the only one.
    """
    model, _, only = case.partition(" ")
    task = Task.synthetic(model, BATCH_SIZE[model], group.device)
    variants = []
    for name, wrap in _wraps(quick).items():
        if only and name != only:
            continue
        trainee = Trainee(task, wrap)
        for _ in range(_NUM_WARM_UP):
            trainee.step()
        variants.append(Variant(name, timed(trainee.step), group.world_size))
    blocks = alternate(variants, group, 1 if quick else _NUM_BLOCKS, 1 if quick else _NUM_STEPS)
    seconds = {name: [one for block in own for one in block] for name, own in blocks.items()}
    return {"seconds": seconds, "tokens": int(torch.numel(task.inputs))}


def _wraps(quick: bool) -> dict[str, Wrap]:
    sizes = (25,) if quick else (10, 25, 100)
    return {
        ALONE: lambda model: model,
        **{f"DDP {mb} MB": partial(distributed, mb) for mb in sizes},
        "DDP, fp16 hook": half,
        "DDP, dynamic8": partial(encoded, "dynamic8"),
    }


def distributed(mb: int, model: nn.Module) -> DistributedDataParallel:
    """Return the model in DistributedDataParallel with buckets of so many MB."""
    return DistributedDataParallel(model, bucket_cap_mb=mb, gradient_as_bucket_view=True)


def half(model: nn.Module) -> DistributedDataParallel:
    """Return the model in DistributedDataParallel with torch's fp16 hook."""
    parallel = distributed(25, model)
    parallel.register_comm_hook(None, fp16_compress_hook)
    return parallel


def encoded(codec: str, model: nn.Module) -> DistributedDataParallel:
    """Return the model in DistributedDataParallel with a codec's hook."""
    parallel = distributed(25, model)
    parallel.register_comm_hook(*ddp_hook(codec))
    return parallel
