"""Learning rates by completed samples, compared with torch's schedules."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
)

from hogbatch_replicas import classifying
from paceline.core.settings import TrainSettings
from paceline.exchange.setup import learning_by, optimizer_by
from paceline.strategies.hogbatch.scheduler import ScheduledRate
from refusals import refused

BATCH_SIZE, NUM_STEPS, RATE = 8, 20, 0.3
SCHEDULES: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "warm-up": lambda optimizer: SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=5), CosineAnnealingLR(optimizer, NUM_STEPS - 5)],
        milestones=[5],
    ),
    "one cycle": lambda optimizer: OneCycleLR(
        optimizer, 0.7, total_steps=NUM_STEPS + 1, cycle_momentum=False
    ),
}


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), RATE, momentum=0.9)


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_batch_has_the_rate_of_the_step_that_would_contain_it(make):
    optimizer = sgd(nn.Linear(1, 1))
    schedule = make(optimizer)
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduled = ScheduledRate(sgd, make, BATCH_SIZE)
        for num_samples in range(0, NUM_STEPS * BATCH_SIZE, 3):
            expected = rates[num_samples // BATCH_SIZE] / RATE
            assert scheduled.factor(num_samples) == pytest.approx(expected, rel=1e-12)
    assert len(set(rates)) > 5  # otherwise the comparison would be trivial


def test_the_rate_follows_the_highest_number_of_samples_so_far():
    """Also after resuming, and after the samples of a lost worker are returned."""
    scheduled, resumed = (ScheduledRate(sgd, SCHEDULES["lambda"], BATCH_SIZE) for _ in range(2))
    for steps, expected in ((4, 1 / 5), (2, 1 / 5), (5, 1 / 6)):
        assert scheduled.factor(steps * BATCH_SIZE) == pytest.approx(expected)
    assert resumed.factor(5 * BATCH_SIZE) == pytest.approx(1 / 6)
    assert ScheduledRate(sgd, lambda optimizer: None, BATCH_SIZE).factor(10**9) == 1.0


@pytest.mark.parametrize(
    ("rate", "schedule"),
    [
        (RATE, lambda one: OneCycleLR(one, 0.7, total_steps=20)),  # changes momentum
        (0.0, SCHEDULES["lambda"]),
    ],
)
def test_a_schedule_that_is_no_factor_of_the_rate_is_refused(rate: float, schedule):
    with refused("schedule"):
        ScheduledRate(lambda one: SGD(one.parameters(), rate, momentum=0.9), schedule, BATCH_SIZE)


def test_settings_override_the_recipe_and_its_schedule_gets_the_number_of_steps():
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    own = replace(
        classifying(lambda: nn.Linear(2, 2), data),
        optimizer=lambda some: AdamW(some, 0.07),
        schedule=lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps),
    )
    told = {"optimizer": "rmsprop", "momentum": 0.0}
    for given, kind in ((told, RMSprop), ({}, AdamW)):
        settings = TrainSettings(model="mine:recipe", **given)
        made = optimizer_by(own, settings)(own.model().parameters())
        assert type(made) is kind
        schedule = learning_by(own, settings, 50)[1](made)
        assert (type(schedule), schedule.T_max) == (CosineAnnealingLR, 50)
    assert made.param_groups[0]["lr"] == 0.07
