"""Measure how much of the exchange of `host` overlaps with backward, and step times.

Variants (see `benchmarks/steps.py`): `host` with chunks of one layer and with automatic chunks;
DistributedDataParallel with several bucket sizes; ranks that exchange nothing; and ranks that only
wait for each other.
"""

from pathlib import Path
from typing import Any

import torch
from part import Part

import steps
from figures import shown
from paceline.links.group import Group
from paceline.training.models.transformers import GPT
from ranks import on_ranks
from steps import Task

_HERE = Path(__file__).parent
_NUM_BLOCKS, _NUM_STEPS, _BUDGET_S = 12, 2, 12.0
BATCH_SIZES = {"alexnet": 64, "resnet50": 32, "gpt": 4}  # per rank
SMOKE_SIZES = {"lenet5": 2, "gpt": 2}
_GPT2 = {"vocabulary": 50_257, "context": 1024}  # 124 million parameters
_SMOKE_GPT = {"vocabulary": 64, "context": 8, "width": 8, "num_heads": 2, "num_layers": 1}
_HOST = ("host", "host, chunk auto")


def run(part: Part) -> None:
    """Measure steps of each model on a shared GPU and with a GPU per rank."""
    for where, (num_ranks, num_gpus) in part.worlds().items():
        for name, batch_size in (SMOKE_SIZES if part.smoke else BATCH_SIZES).items():
            found = on_ranks(
                _HERE.parent, "evidence.hidden", num_ranks, part.smoke, num_gpus, case=name
            )
            part.keep(f"{name}, {batch_size} samples a rank, {where}", found, _line(found))


def _line(figures: dict[str, Any]) -> str:
    rows = figures["variants"]
    ways = ("lone", "together", figures["best_ddp"], *_HOST)
    seconds = (f"{name} {shown(rows[name]['seconds'], 1e3, 1)} ms" for name in ways)
    shares = (rows[name]["exchange"].get("hidden_share") for name in _HOST)
    hidden = " and ".join("unknown" if one is None else f"{one:.0%}" for one in shares)
    return f"{', '.join(seconds)}; hidden of the host's exchange: {hidden}"


def measure(group: Group, smoke: bool, name: str) -> dict[str, Any]:
    """Return the figures of all variants for a model; only on rank 0."""
    task = task_of(name, smoke, group.device)
    buckets = {"buckets_mb": (25,)} if smoke else {}
    turns = (2, 2) if smoke else (_NUM_BLOCKS, _NUM_STEPS, _BUDGET_S)
    return steps.measure(task, steps.wraps(group, *_HOST, **buckets), group, *turns)


def task_of(name: str, smoke: bool, device: torch.device) -> Task:
    """Return a model by name with synthetic data and an optimizer."""
    batch_size = (SMOKE_SIZES if smoke else BATCH_SIZES)[name]
    if name != "gpt":
        return Task.synthetic(name, batch_size, device)
    sizes: dict[str, Any] = _SMOKE_GPT if smoke else _GPT2
    generator = torch.Generator().manual_seed(0)
    shape = batch_size, sizes["context"] + 1
    tokens = torch.randint(sizes["vocabulary"], shape, generator=generator)
    return Task(
        build=lambda: GPT(**sizes).to(device),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9),
        inputs=tokens[:, :-1].to(device),
        targets=tokens[:, 1:].to(device),
    )
