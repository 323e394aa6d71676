"""What a run of uneven workers does not go on from, before any worker is started."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from hogbatches import classifying
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.group import Group
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.run import HogbatchRunner, epoch_sizes, runner_of
from refusals import refused

NUM_SAMPLES = 80


@contextmanager
def runner(
    model: nn.Module | None = None,
    num_samples: int = NUM_SAMPLES,
    label: int = 0,
    policy: str = "adaptive",
    **changes: Any,
) -> Iterator[HogbatchRunner]:
    """A runner whose workers are not started."""
    model = model or nn.Linear(6, 3)
    data = torch.zeros(num_samples, 6), torch.full((num_samples,), label)
    settings = TrainSettings(
        model="mine:recipe", strategy="hogbatch", **{"batch_size": 8} | changes
    )
    alone = Group.alone(torch.device("cpu"), settings.deadline_s)
    session = TrainingSession(
        settings, STRATEGY, Hogbatch(policy=policy), "run", alone, MagicMock()
    )
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
    ("other", "changes"),
    [
        ({"model": nn.Linear(6, 4)}, {}),
        ({"model": nn.Linear(6, 3, bias=False)}, {}),
        ({"num_samples": 90}, {}),
        ({"epochs": 2}, {"epochs": [EPOCH, EPOCH]}),
    ],
)
def test_another_run_is_refused_and_nothing_is_changed(other, changes):
    tensors, values = saved(**changes)
    with runner(**other) as one:
        before = [parameter.detach().clone() for parameter in one._model.parameters()]
        with refused("resume"):
            one.restore(tensors, values)
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


@pytest.mark.parametrize(
    ("field", "changes"),
    [("batch_size", {"batch_size": NUM_SAMPLES + 1}), ("data", {"label": 3})],
)
def test_batches_and_labels_that_do_not_fit_are_refused(field: str, changes):
    with refused(field), runner(policy="hogbatch", **changes) as one:
        one.measure()
