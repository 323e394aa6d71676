"""A training of a tiny GPT on two ranks in a loop of one's own, with an inner optimizer."""

import math
from typing import Any

import sized_gpt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.exchange.learner import evaluate
from paceline.links.group import Group
from paceline.training.data import ShardedBatches
from paceline.training.data.batch import Batch

_BATCH_SIZE, _NUM_STEPS, _WARM_UP = 32, 1500, 100
_RATES = {"adamw": (0.003,), "muon": (0.02, 0.003)}  # of matrices by Muon, and of the others


def measure(group: Group, quick: bool, case: str) -> dict[str, Any]:
    """Return the test loss after a run: `case` is an optimizer, and the steps of a round or "-"."""
    name, every = case.split()
    recipe, num_steps = sized_gpt.tiny(), 30 if quick else _NUM_STEPS
    torch.manual_seed(0)
    model = recipe.model()
    optimizers = _optimizers(name, model)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: _factor(step, num_steps))
        for one in optimizers
    ]
    parallel: nn.Module = model
    if every == "-":
        parallel = DistributedDataParallel(model)
    else:
        updates = paceline.LocalUpdates(model, optimizers, int(every), num_steps=num_steps)
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


def _factor(step: int, num_steps: int) -> float:
    return min(1.0, (step + 1) / _WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / num_steps))
