"""A run of hogbatch before its workers start: epochs, invalid settings, state."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR

from hogbatch_replicas import classifying
from paceline.core.settings import TrainSettings
from paceline.exchange.checkpoints import State
from paceline.exchange.session import Progress, TrainingSession
from paceline.exchange.setup import epoch_lengths, learning_by, optimizer_by
from paceline.links.group import Group
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.run import HogbatchRunner, start
from paceline.training.recipes.named import given
from refusals import refused

NUM_SAMPLES = 80


@contextmanager
def runner(
    model: nn.Module | None = None, num_samples: int = NUM_SAMPLES, **changes: Any
) -> Iterator[HogbatchRunner]:
    """Yield a runner without started workers."""
    model = model or nn.Linear(6, 3)
    data = torch.zeros(num_samples, 6), torch.zeros(num_samples, dtype=torch.int64)
    recipe = replace(classifying(lambda: model, data), num_classes=3)
    with given(recipe) as name:
        settings = TrainSettings(model=name, strategy="hogbatch", **{"batch_size": 8} | changes)
        alone = Group.alone(torch.device("cpu"), settings.deadline_s)
        session = TrainingSession(settings, STRATEGY, Hogbatch(), "run", alone, Progress())
        with start(session) as found:
            yield found


def saved() -> State:
    """Return the state of a run before its first batch, as it is read from a checkpoint."""
    with runner() as one:
        tensors, parts = one.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return State(tensors, json.loads(json.dumps(parts)))


EPOCH = {"number": 0, "train_loss": 1.0, "test_loss": None, "score": None, "seconds": 1.0}


@pytest.mark.parametrize(
    ("other", "num_epochs"),
    [
        ({"model": nn.Linear(6, 4)}, 0),
        ({"model": nn.Linear(6, 3, bias=False)}, 0),
        ({"num_samples": 90}, 0),
        ({"epochs": 2}, 2),
    ],
)
def test_the_state_of_another_run_is_refused_and_changes_nothing(other, num_epochs):
    state = saved()
    if num_epochs:
        state.parts["hogbatch"]["epochs"] = [EPOCH] * num_epochs
    with runner(**other) as one:
        before = [parameter.detach().clone() for parameter in one._model.parameters()]
        with refused("resume"):
            one.restore(state)
        for parameter, own in zip(one._model.parameters(), before, strict=True):
            assert torch.equal(parameter, own)


def test_a_checkpoint_with_another_log_of_batches_is_refused():
    """Its times would be read in another unit."""
    state = saved()
    state.tensors["log/batches"] = state.tensors.pop("log/batches_s")
    with runner() as one, refused("resume"):
        one.restore(state)


def test_steps_are_batches_of_the_batch_size():
    counts = [{"epochs": 3}, {"steps": 5}, {"steps": 10}, {"steps": 25}]
    settings = [TrainSettings(model="mine:recipe", batch_size=8, **count) for count in counts]
    sizes = [epoch_lengths(one, NUM_SAMPLES, one.batch_size) for one in settings]
    assert sizes == [(80, 80, 80), (40,), (80,), (80, 80, 40)]


def test_settings_override_the_recipe_and_its_schedule_gets_the_number_of_steps():
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    own = replace(
        classifying(lambda: nn.Linear(2, 2), data),
        optimizer=lambda some: AdamW(some, 0.07),
        schedule=lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps),
    )
    told = {"optimizer": "rmsprop", "momentum": 0.0}
    for changes, kind in ((told, RMSprop), ({}, AdamW)):
        settings = TrainSettings(model="mine:recipe", **changes)
        made = optimizer_by(own, settings)(own.model().parameters())
        assert type(made) is kind
        schedule = learning_by(own, settings, 50)[1](made)
        assert (type(schedule), schedule.T_max) == (CosineAnnealingLR, 50)
    assert made.param_groups[0]["lr"] == 0.07


def test_a_batch_that_is_larger_than_the_data_is_refused():
    with refused("batch_size"), runner(batch_size=NUM_SAMPLES + 1):
        pass
