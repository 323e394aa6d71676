"""Compare local updates on two hosts, one four times slower, with the fast host alone.

The link has 1 Gbit/s. A GPT of a million parameters (sized_gpt.py) trains on the fast host alone
and on both; the slow host runs a quarter of the steps in each round. Runs of two lengths, each with
a full schedule, show when both hosts reach the lone host's loss.
"""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import slow_host
import torch
from hosts import TwoHosts, on_hosts
from sized_gpt import small
from slow_host import ALONE, SLOWER
from steps_to_loss import steps_needed
from torch import Tensor
from torch.utils.data import DataLoader

from figures import table
from paceline import LocalUpdates
from paceline.exchange.learner import evaluate
from paceline.links.group import Group
from paceline.training.recipes.optimizers import schedule_of
from paceline.training.recipes.recipe import Recipe

_LENGTHS = {ALONE: 1.0, "both, as long": 1.0, "both, shorter": 0.85}  # times the lone host's steps
_BATCH_SIZE, _LEARNING_RATE = 16, 0.002
_NUM_STEPS, _SYNC_EVERY, _REPEATS = 600, 20, 3


def part(quick: bool) -> dict[str, Any]:
    """Return the runs of the fast host alone and of both hosts."""
    with TwoHosts("1gbit") as hosts:
        return on_hosts(hosts, Path(__file__).parent, "uneven", quick)


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return each run's steps of the fast host, tokens of all hosts, seconds, and loss."""
    num_steps, every, repeats = (3 * SLOWER, SLOWER, 1) if quick else (_NUM_STEPS, _SYNC_EVERY, 3)
    run = partial(_run, small(), group, num_steps, every)
    return slow_host.in_turns(group, _LENGTHS, repeats, run)


def _run(
    recipe: Recipe, group: Group, most_steps: int, sync_every: int, name: str, seed: int
) -> dict[str, float]:
    """Train for the length `name`; the slow host runs a quarter of the steps."""
    num_steps = round(_LENGTHS[name] * most_steps / SLOWER) * SLOWER
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

    known = {"codec": "dynamic4", "num_steps": own_steps}
    every = sync_every // slower
    updates = nullcontext() if name == ALONE else LocalUpdates(model, optimizer, every, **known)
    with updates:
        order = torch.Generator().manual_seed(2 * seed + group.rank)
        batches = DataLoader(
            recipe.train, _BATCH_SIZE, shuffle=True, drop_last=True, generator=order
        )
        seconds = slow_host.train(batches, step, own_steps, is_slow=slower > 1)
    windows = num_steps * (1.0 if name == ALONE else 1 + 1 / SLOWER) * _BATCH_SIZE
    tokens = windows * recipe.example(1).shape[1]
    alone = Group.alone(torch.device("cpu"), group.deadline_s)
    loss, _ = evaluate(model, recipe.test_samples, alone, recipe)
    own = loss / len(recipe.test_samples)
    return {"steps": num_steps, "tokens": tokens, "seconds": seconds, "loss": own}


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    lines = [
        (name, str(own[0]["steps"]), *cells)
        for (name, *cells), own in zip(slow_host.lines(figures), figures.values(), strict=True)
    ]
    head = ("gpt-1m, 1 Gbit/s, 4:1", "steps", "tokens/s", "times the fast host", "s", "test loss")
    alone, *both = figures.values()
    losses = {str(own[0]["steps"]): [one["loss"] for one in own] for own in both}
    needed = steps_needed(losses, [one["loss"] for one in alone])
    shares = []
    for seed, (one, steps) in enumerate(zip(alone, needed, strict=True)):
        step_s = median(own[seed]["seconds"] / own[seed]["steps"] for own in both)
        shares.append(steps * step_s / one["seconds"])
    told = ", ".join("not reached" if one == float("inf") else f"{one:.2f}" for one in shares)
    said = f"Time of both to the fast host's loss, beside its own: {told}."
    return f"{table('', head, lines)}\n\n{said}"
