"""Training of a GPT of a million parameters on the first of two hosts, and on both."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from sized_gpt import small
from slow_host import SLOWER, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

import paceline
from paceline.links.group import Group
from paceline.training.recipes.recipe import Recipe
from paceline.training.recipes.schedules import schedule_of

ALONE = "the fast host alone"
_LENGTHS = {ALONE: 1.0, "both, as long": 1.0, "both, shorter": 0.85}  # of the lone host's steps
_BATCH_SIZE, _LEARNING_RATE = 16, 0.002
_NUM_STEPS, _SYNC_EVERY, _REPEATS = 600, 20, 3


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the steps of the fast host, tokens of all, seconds and losses of runs in turns."""
    recipe = small()
    num_steps, every = (3 * SLOWER, SLOWER) if quick else (_NUM_STEPS, _SYNC_EVERY)
    runs: dict[str, list[dict[str, float]]] = {}
    for seed in range(1 if quick else _REPEATS):
        for name, length in _LENGTHS.items():
            group.barrier()
            if group.rank == 0 or name != ALONE:
                steps = round(length * num_steps / SLOWER) * SLOWER
                own = _run(recipe, group, steps, every, seed, is_alone=name == ALONE)
                runs.setdefault(name, []).append(own)
    group.barrier()
    return runs


def _run(
    recipe: Recipe, group: Group, num_steps: int, sync_every: int, seed: int, *, is_alone: bool
) -> dict[str, float]:
    """Train with a schedule of this length; the slow host takes a quarter of the steps."""
    slower = 1 if group.rank == 0 else SLOWER
    own_steps = num_steps // slower
    torch.manual_seed(seed)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    schedule = schedule_of("cosine", own_steps // 15)(optimizer, own_steps)

    def step(batch: list[Tensor]) -> None:
        recipe.loss(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    updates = (
        nullcontext()
        if is_alone
        else paceline.LocalUpdates(
            model, optimizer, sync_every // slower, codec="dynamic4", num_steps=own_steps
        )
    )
    started_s = time.monotonic()
    with updates:
        train(_batches(recipe, 2 * seed + group.rank), step, own_steps, is_slow=slower > 1)
    seconds = time.monotonic() - started_s
    windows = num_steps * (1.0 if is_alone else 1 + 1 / SLOWER) * _BATCH_SIZE
    context = recipe.example(1).shape[1]
    figures = {"steps": num_steps, "tokens": windows * context, "seconds": seconds}
    return {**figures, "loss": _loss(recipe, model)}


def _batches(recipe: Recipe, seed: int) -> Iterator[list[Tensor]]:
    order = RandomSampler(recipe.train, generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
    yield from DataLoader(recipe.train, _BATCH_SIZE, sampler=order, drop_last=True)  # type: ignore[arg-type]


def _loss(recipe: Recipe, model: nn.Module) -> float:
    assert recipe.test is not None
    tests = DataLoader(recipe.test, _BATCH_SIZE)  # type: ignore[arg-type]
    model.eval()
    with torch.no_grad():
        losses = [float(recipe.loss(model(inputs), targets)) for inputs, targets in tests]
    return sum(losses) / len(losses)
