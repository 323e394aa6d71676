"""AlexNet by torch's DistributedDataParallel, without and with its hooks: what a step takes, sends.

CASE in the environment is a JSON object: `batch_size` of a rank, `device` whose time the layers
take (None: they compute), `hooks` by name, `blocks` and `steps` in each.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from paceline.core.cost import Roofline, compute_lane, layer_times
from paceline.links.group import Group
from paceline.records.machine_file import find_device
from paceline.training.models.paced import PacedModel, PacedSGD
from paceline.training.recipes.named import workload_of
from ranks import Variant, alternate, compare, timed
from trainee import Task, Trainee, Wrap

FLOAT32, ALONE = "DDP float32", "alone, nothing exchanged"
_NUM_WARM_UP = 3  # PowerSGD begins after two steps with plain sums
_WIRE = Path("/sys/class/net/wire/statistics")


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return seconds and bytes of all variants, as the first rank saw them."""
    case = json.loads(os.environ["CASE"])
    task = _task(case["device"], case["batch_size"], group)
    blocks, steps = (2, 1) if quick else (case["blocks"], case["steps"])
    variants, counted = [], {}
    for name in (ALONE, FLOAT32, *case["hooks"]):
        trainee = Trainee(task, _WRAPS[name])
        for _ in range(_NUM_WARM_UP):
            trainee.step()
        counted[name] = Counted(timed(trainee.step))
        variants.append(Variant(name, counted[name], group.world_size))
    rows = compare(alternate(variants, group, blocks, steps), FLOAT32)
    for name, row in rows.items():
        row["wire_nbytes"] = median(counted[name].nbytes)
        row["samples"] = case["batch_size"] * group.world_size
    return rows


def _task(device: str | None, batch_size: int, group: Group) -> Task:
    if device is None:
        return Task.synthetic("alexnet", batch_size, group.device)
    known, workload = find_device(device), workload_of("alexnet", batch_size, None)
    rate = Roofline.of(known.machine).rates[compute_lane(known.device.name)]

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, PacedModel)
        return PacedSGD(model.parameters(), model.update_s)

    return Task(
        build=lambda: PacedModel(workload, *layer_times(workload, rate)),
        optimizer=optimizer,
        inputs=torch.zeros(1, 1),
        targets=torch.zeros(1, dtype=torch.int64),
    )


def plain(model: nn.Module, bucket_mb: int = 25) -> DistributedDataParallel:
    """Return the model as torch makes it parallel, in buckets of its usual size or another."""
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)


def _hooked(hook: Callable[..., Any], model: nn.Module) -> DistributedDataParallel:
    parallel = plain(model)
    parallel.register_comm_hook(None, hook)
    return parallel


_WRAPS: dict[str, Wrap] = {
    ALONE: lambda model: model,
    FLOAT32: plain,
    "DDP, fp16_compress_hook": partial(_hooked, fp16_compress_hook),
}


class Counted:
    """Runs steps, and notes how many bytes each sent and received over the wire."""

    def __init__(self, run: Callable[[int], list[float]]) -> None:
        self._run = run
        self.nbytes: list[float] = []

    def __call__(self, num_times: int) -> list[float]:
        """Run so many, and return the seconds of each."""
        before = _wire_nbytes()
        seconds = self._run(num_times)
        self.nbytes.append((_wire_nbytes() - before) / num_times)
        return seconds


def _wire_nbytes() -> int:
    return sum(int((_WIRE / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
