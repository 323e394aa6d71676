"""Compare local updates on two hosts, one four times slower, with the fast host alone.

The link has 1 Gbit/s. A GPT of a million parameters (sized_gpt.py) trains on the fast host alone
and on both; the slow host runs a quarter of the steps in each round. Runs of two lengths, each with
a full schedule, show when both hosts reach the lone host's loss.
"""

import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hosts import TwoHosts, on_hosts
from sized_gpt import small
from steps_to_loss import steps_needed
from torch.utils.data import DataLoader

from figures import table
from paceline import LocalUpdates
from paceline.exchange.learner import evaluate
from paceline.links.group import Group
from paceline.training.recipes.optimizers import schedule_of
from paceline.training.recipes.recipe import Recipe

_ALONE, _SLOWER = "the fast host alone", 4
_LENGTHS = {_ALONE: 1.0, "both, as long": 1.0, "both, shorter": 0.85}  # times the lone host's steps
_BATCH_SIZE, _LEARNING_RATE = 16, 0.002
_NUM_STEPS, _SYNC_EVERY, _REPEATS = 600, 20, 3


def part(quick: bool) -> dict[str, Any]:
    """Return the runs of the fast host alone and of both hosts."""
    with TwoHosts("1gbit") as hosts:
        return on_hosts(hosts, Path(__file__).parent, "uneven", quick)


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return each run's steps of the fast host, tokens of all hosts, seconds, and loss."""
    num_steps, every = (3 * _SLOWER, _SLOWER) if quick else (_NUM_STEPS, _SYNC_EVERY)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in _LENGTHS}
    for seed in range(1 if quick else _REPEATS):
        for name, length in _LENGTHS.items():
            group.barrier()
            if group.rank == 0 or name != _ALONE:
                steps = round(length * num_steps / _SLOWER) * _SLOWER
                is_alone = name == _ALONE
                runs[name].append(_run(small(), group, steps, every, seed, is_alone=is_alone))
    group.barrier()
    return runs


def _run(
    recipe: Recipe, group: Group, num_steps: int, sync_every: int, seed: int, *, is_alone: bool
) -> dict[str, float]:
    """Train for `num_steps` steps of the fast host; the slow host runs a quarter of the steps."""
    slower = 1 if group.rank == 0 else _SLOWER
    own_steps = num_steps // slower
    torch.manual_seed(seed)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    schedule = schedule_of("cosine", own_steps // 15)(optimizer, own_steps)
    order = torch.Generator().manual_seed(2 * seed + group.rank)
    batches = DataLoader(recipe.train, _BATCH_SIZE, shuffle=True, drop_last=True, generator=order)
    known: dict[str, Any] = {"codec": "dynamic4", "num_steps": own_steps}
    every = sync_every // slower
    with nullcontext() if is_alone else LocalUpdates(model, optimizer, every, **known):
        started_s = time.monotonic()
        for _, (inputs, targets) in zip(range(own_steps), batches, strict=False):
            busy_s = time.process_time()
            recipe.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            time.sleep((slower - 1) * (time.process_time() - busy_s))
        seconds = time.monotonic() - started_s
    windows = num_steps * (1.0 if is_alone else 1 + 1 / _SLOWER) * _BATCH_SIZE
    tokens = windows * recipe.example(1).shape[1]
    lone = Group.alone(torch.device("cpu"), group.deadline_s)
    loss = evaluate(model, recipe.test_samples, lone, recipe)[0] / len(recipe.test_samples)
    return {"steps": num_steps, "tokens": tokens, "seconds": seconds, "loss": loss}


def text(figures: dict[str, Any]) -> str:
    """Return the table."""
    speeds = {
        name: [one["tokens"] / one["seconds"] for one in own] for name, own in figures.items()
    }
    lines = []
    for name, own in figures.items():
        times = sorted(a / b for a, b in zip(speeds[name], speeds[_ALONE], strict=True))
        between = "" if name == _ALONE else f" [{times[0]:.2f}, {times[-1]:.2f}]"
        seconds = median(one["seconds"] for one in own)
        losses = " ".join(f"{one['loss']:.3f}" for one in own)
        speed = f"{median(speeds[name]):,.0f}", f"{median(times):.2f}{between}"
        lines.append((name, str(own[0]["steps"]), *speed, f"{seconds:.1f}", losses))
    head = ("gpt-1m, 1 Gbit/s, 4:1", "steps", "tokens/s", "times the fast host", "s", "test loss")
    alone, *both = figures.values()
    losses_of = {str(own[0]["steps"]): [one["loss"] for one in own] for own in both}
    needed = steps_needed(losses_of, [one["loss"] for one in alone])
    shares = []
    for seed, (one, steps) in enumerate(zip(alone, needed, strict=True)):
        step_s = median(own[seed]["seconds"] / own[seed]["steps"] for own in both)
        shares.append(steps * step_s / one["seconds"])
    told = ", ".join("not reached" if one == float("inf") else f"{one:.2f}" for one in shares)
    said = f"Time of both to the fast host's loss, beside its own: {told}."
    return f"{table('', head, lines)}\n\n{said}"
