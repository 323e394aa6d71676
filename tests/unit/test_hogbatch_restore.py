"""What a run of uneven workers does not go on from, before any worker is started."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hogbatches import classifying
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.run import HogbatchRunner, epoch_sizes, runner_of

NUM_SAMPLES = 80


class Silent:
    def begin(self, total: int, unit: str) -> None:
        """Show nothing."""

    def advance(self, count: int = 1) -> None:
        """Show nothing."""

    def epoch(self, epoch: Epoch, score: str) -> None:
        """Show nothing."""

    def status(self, text: str) -> None:
        """Show nothing."""


@contextmanager
def runner(
    model: nn.Module | None = None, num_samples: int = NUM_SAMPLES, **changes: Any
) -> Iterator[HogbatchRunner]:
    """A runner whose workers are not started."""
    model = model or nn.Linear(6, 3)
    data = torch.zeros(num_samples, 6), torch.zeros(num_samples, dtype=torch.int64)
    settings = TrainSettings(model="mine:recipe", strategy="hogbatch", batch_size=8, **changes)
    alone = Group.alone(torch.device("cpu"), settings.deadline_s)
    session = TrainingSession(settings, STRATEGY, Hogbatch(), "run", alone, Silent())
    recipe = replace(classifying(lambda: model, data), num_classes=3)
    with runner_of(session, recipe, model) as found:
        yield found


def saved(**changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The state of a run that has not begun, as a checkpoint has it."""
    with runner() as one:
        tensors, values = one.state()
        copied = {name: tensor.clone() for name, tensor in tensors.items()}
    return copied, json.loads(json.dumps(values)) | changes


def test_a_run_that_has_not_begun_is_restored():
    tensors, values = saved()
    with runner() as one:
        one.restore(tensors, values)
        assert torch.equal(one._model.weight, tensors["model/weight"])
        assert one.coordinator.num_samples == 0


EPOCH = {"number": 0, "train_loss": 1.0, "test_loss": None, "score": None, "seconds": 1.0}


@pytest.mark.parametrize(
    ("other", "changes", "message"),
    [
        ({"model": nn.Linear(6, 4)}, {}, "'bias' of the model was float32 3 in the run, and is "),
        ({"model": nn.Linear(6, 3, bias=False)}, {}, "was float32 3 in the run, and is missing"),
        ({"num_samples": 90}, {}, "the 1 epochs that have begun had 80 samples in the run, and"),
        ({"epochs": 2}, {"epochs": [EPOCH, EPOCH]}, "resume: all 2 epochs of the run are done"),
    ],
)
def test_another_run_is_refused_and_nothing_is_changed(other, changes, message: str):
    tensors, values = saved(**changes)
    with runner(**other) as one:
        before = [parameter.detach().clone() for parameter in one._model.parameters()]
        with pytest.raises(InvalidInput) as raised:
            one.restore(tensors, values)
        assert message in str(raised.value)
        for parameter, own in zip(one._model.parameters(), before, strict=True):
            assert torch.equal(parameter, own)


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"epochs": 3}, (80, 80, 80)),
        ({"steps": 5}, (40,)),
        ({"steps": 10}, (80,)),
        ({"steps": 25}, (80, 80, 40)),
    ],
)
def test_steps_are_batches_of_the_batch_size(changes, sizes):
    settings = TrainSettings(model="mine:recipe", batch_size=8, **changes)
    assert epoch_sizes(settings, NUM_SAMPLES) == sizes


def test_what_asynchronous_workers_cannot_follow_is_refused_with_what_would_do():
    refused = STRATEGY.refused_settings
    assert set(refused) == {"accumulate", "evaluate_every"} <= set(TrainSettings.model_fields)
    assert "cpu_batch" in refused["accumulate"]
    assert "after each epoch" in refused["evaluate_every"]
