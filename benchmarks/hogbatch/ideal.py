"""Compute an upper bound of the gain from a slower worker, in simulated time.

One process makes the updates in the order in which two workers would finish them. Each gradient is
of the model at the start of its batch. A sample takes the fast worker one unit of time and the
slower worker `slow` units. Requests, locks and contention for memory or cores take no time, so no
implementation gains more on this data set. Seeds, network, policies and learning rates are the same
as in `target`; the loss is tested four times per epoch.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf, log
from statistics import median
from typing import Any, NamedTuple

import torch
from cases import QUICK_MODEL, RACE_MODEL, dataset
from target import (
    ALONE_SIZES,
    BATCH,
    GOAL,
    QUICK_GOAL,
    QUICK_SIZES,
    RATES,
    RATIOS,
    SEEDS,
    SPREAD,
    TUNED,
)
from torch import nn

from paceline.core.machine import DeviceKind
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.policy import Policy, policy_of
from paceline.training.data.sampler import shuffled
from paceline.training.models import find
from paceline.training.recipes.losses import class_loss

_TESTS_AN_EPOCH = 4


class _Way(NamedTuple):
    """A policy, the slowdown of each worker, and the minimum and maximum batch size."""

    slow: tuple[float, ...]
    least: int
    most: int
    policy: str

    def made(self) -> Policy:
        specs = [WorkerSpec(DeviceKind.CPU, slow=slow) for slow in self.slow]
        config = Hogbatch(workers=len(specs), policy=self.policy, cpu_batch=(self.least, self.most))
        return policy_of(config, specs, [1.0] * len(specs), BATCH)


def measure(quick: bool) -> dict[str, Any]:
    """Return two workers' speed-up over the fast worker alone, per speed ratio and policy."""
    sizes = QUICK_SIZES if quick else ALONE_SIZES
    seeds = range(1) if quick else SEEDS
    tuned = {size: _tuned(_Way((1.0,), size, size, "cpu_gpu"), quick) for size in sizes}
    most = min(tuned, key=lambda size: tuned[size][0])
    alone = [_time_to(_Way((1.0,), most, most, "cpu_gpu"), tuned[most][1], n, quick) for n in seeds]
    found: dict[str, Any] = {}
    for ratio in RATIOS[:1] if quick else RATIOS:
        ways = {
            f"adaptive, {max(1, most // SPREAD)} to {most}": (max(1, most // SPREAD), "adaptive"),
            f"fixed equal, {most}": (most, "cpu_gpu"),
        }
        found[f"{ratio}:1"] = {
            name: _compared(_Way((1.0, ratio), least, most, policy), alone, seeds, quick)
            for name, (least, policy) in ways.items()
        }
    return found


def _compared(
    way: _Way, alone: list[tuple[float, int]], seeds: range, quick: bool
) -> dict[str, Any]:
    _, rate = _tuned(way, quick)
    took = [_time_to(way, rate, seed, quick) for seed in seeds]
    ratios = [one / own for (one, _), (own, _) in zip(alone, took, strict=True)]
    medians = median(one for one, _ in alone) / median(own for own, _ in took)
    faster = {"of_medians": medians, "least": min(ratios), "most": max(ratios)}
    return {"rate": rate, "faster": faster, "updates": round(median(n for _, n in took))}


def _tuned(way: _Way, quick: bool) -> tuple[float, float]:
    """Return the shortest time to the goal over the grid of learning rates, and its rate."""
    rates = RATES[2:3] if quick else RATES
    return min((_time_to(way, rate, TUNED, quick)[0], rate) for rate in rates)


def _time_to(way: _Way, rate: float, seed: int, quick: bool) -> tuple[float, int]:
    """Return the time to the goal (inf if the run misses it) and the number of updates."""
    goal, data = QUICK_GOAL if quick else GOAL, dataset(quick, seed)
    torch.manual_seed(seed)
    model = find(QUICK_MODEL if quick else RACE_MODEL).build(data.num_classes)
    test_inputs, test_targets = data.test.__getitems__(range(len(data.test)))
    num_samples = len(data.train)
    every, done, number = num_samples // _TESTS_AN_EPOCH, 0, 0
    before_s, before = 0.0, log(data.num_classes)
    for number, (now_s, size) in enumerate(_updates(way, rate, seed, model, data, goal.epochs), 1):
        done += size
        if done < every:
            continue
        done -= every
        with torch.no_grad():
            loss = float(class_loss(model(test_inputs), test_targets))
        if loss <= goal.loss:
            share = (before - goal.loss) / (before - loss)
            return before_s + share * (now_s - before_s), number
        before_s, before = now_s, loss
    return inf, number


def _updates(
    way: _Way, rate: float, seed: int, model: nn.Module, data: Any, epochs: int
) -> Iterator[tuple[float, int]]:
    """Apply updates in the order of their end times; yield each end time and batch size."""
    policy, count = way.made(), len(way.slow)
    updates, sizes = [0.0] * count, [0] * count
    order = (torch.from_numpy(shuffled(len(data.train), seed, epoch)) for epoch in range(epochs))
    queue: list[tuple[float, int, int, list[torch.Tensor]]] = []
    samples = torch.cat(list(order))
    place = 0

    def begin(worker: int, now_s: float) -> None:
        nonlocal place
        sizes[worker] = policy.next_batch(worker, updates, sizes)
        taken = samples[place : place + sizes[worker]]
        place += len(taken)
        if not len(taken):
            return
        inputs, targets = data.train.__getitems__(taken)
        gradients = torch.autograd.grad(
            class_loss(model(inputs), targets), list(model.parameters())
        )
        ends_s = now_s + len(taken) * way.slow[worker]
        heappush(queue, (ends_s, worker, len(taken), list(gradients)))

    for worker in range(count):
        begin(worker, 0.0)
    while queue:
        now_s, worker, size, gradients = heappop(queue)
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= rate * size / BATCH * gradient
        updates[worker] += 1
        yield now_s, size
        begin(worker, now_s)
