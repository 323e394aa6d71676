"""Compare AdamW and Muon as inner optimizers of local updates and in synchronous training.

Two ranks train a tiny GPT (sized_gpt.py) in a PyTorch loop for 1,500 steps of 2,048 tokens, one
seed. MuLoCo (arXiv 2505.23725) reports a smaller loss with Muon for rounds of equal length.
"""

from pathlib import Path
from typing import Any

import sized_gpt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from figures import table
from paceline import LocalUpdates
from paceline.exchange.learner import evaluate
from paceline.links.group import Group
from paceline.training.data import ShardedBatches
from paceline.training.data.batch import Batch
from paceline.training.recipes.optimizers import schedule_of
from ranks import on_ranks

_KINDS, _PERIODS = ("adamw", "muon"), ("-", "10", "30", "100")
_BATCH_SIZE, _NUM_STEPS, _WARM_UP = 32, 1500, 100
_RATES = {"adamw": (0.003,), "muon": (0.02, 0.003)}  # for matrices by Muon, others by AdamW


def part(quick: bool) -> dict[str, Any]:
    """Return the test loss of each optimizer and round length."""
    cases = [f"{kind} {every}" for kind in _KINDS for every in _PERIODS]
    folder = Path(__file__).parent
    return {case: on_ranks(folder, "inner", 2, quick, case=case)["loss"] for case in cases}


def text(figures: dict[str, float]) -> str:
    """Return the table."""
    lines = []
    for kind in _KINDS:
        first, *others = (figures[f"{kind} {every}"] for every in _PERIODS)
        lines.append((kind, f"{first:.3f}", *(f"{one:.3f} ({one - first:+.3f})" for one in others)))
    head = ("inner optimizer", "synchronous", *(f"H = {every}" for every in _PERIODS[1:]))
    return table("", head, lines)


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Train; return the test loss. `case`: optimizer, and steps per round ("-": synchronous)."""
    name, every = case.split()
    recipe, num_steps = sized_gpt.tiny(), 30 if quick else _NUM_STEPS
    torch.manual_seed(0)
    model = recipe.model()
    optimizers = _optimizers(name, model)
    make = schedule_of("cosine", min(_WARM_UP, num_steps // 2))
    schedules = [make(one, num_steps) for one in optimizers]
    parallel: nn.Module = model
    if every == "-":
        parallel = DistributedDataParallel(model)
    else:
        updates = LocalUpdates(model, optimizers, int(every), num_steps=num_steps)
    shape = len(recipe.samples), _BATCH_SIZE, group.rank, group.world_size
    batches = ShardedBatches(*shape, seed=0)
    for _, rows in zip(range(num_steps), batches, strict=False):
        inputs, targets = Batch.of(recipe.samples.__getitems__(rows))
        recipe.loss(parallel(inputs), targets).backward()
        for one, schedule in zip(optimizers, schedules, strict=True):
            one.step()
            one.zero_grad()
            schedule.step()
    if every != "-":
        updates.close()
    assert recipe.test_samples is not None
    loss, _ = evaluate(model, recipe.test_samples, group, recipe)
    return {"loss": sum(group.gather(loss)) / len(recipe.test_samples)}


def _optimizers(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), *_RATES[name])]
    matrix_rate, rate = _RATES[name]
    inner = [
        one
        for own, one in model.named_parameters()
        if one.ndim == 2 and not own.startswith(("tokens", "positions", "head"))
    ]
    others = [one for one in model.parameters() if all(one is not other for other in inner)]
    return [torch.optim.Muon(inner, matrix_rate), torch.optim.AdamW(others, rate)]
