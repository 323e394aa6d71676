"""Set up and time runs on the paper's network for covtype, and on a smaller one, to a loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import log
from typing import Any, NamedTuple

import torch

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Outcome
from paceline.core.settings import TrainSettings
from paceline.exchange.session import Progress, TrainingSession
from paceline.links.group import Group
from paceline.records.settings import configuration, validated_settings
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.run import HogbatchRunner, start
from paceline.training.data import load
from papers.lookalike import covtype_like

_MODEL, _NUM_SAMPLES = "covtype-mlp", 125_000  # a fifth are test samples
_RACE_MODEL, _NUM_OF_RACE = "mlp-54-256-256-2", 25_000  # smaller, for a hundred runs
_QUICK_MODEL, _QUICK_DATA = "mlp-64-128-10", "digits"


def settings(quick: bool, **values: Any) -> TrainSettings:
    """Return a run's settings; `quick` selects a small network and data, `values` override."""
    model = _QUICK_MODEL if quick else _MODEL
    data = _QUICK_DATA if quick else covtype_like(_NUM_SAMPLES)
    given = {"model": model, "data": data, "profile_s": 1.0, "keep_all": True}
    given["momentum"] = 0.0  # the paper trains without momentum
    return validated_settings(given | {"strategy": "hogbatch"} | values)


@contextmanager
def runner_of(wanted: TrainSettings) -> Iterator[HogbatchRunner]:
    """Start a run with these settings and measure its workers' speeds; yield its runner."""
    group = Group.alone(torch.device("cpu"), wanted.deadline_s)
    config = configuration(wanted)
    with start(TrainingSession(wanted, STRATEGY, config, "benchmark", group, Progress())) as runner:
        runner.measure()
        yield runner


def trained(
    runner: HogbatchRunner, is_enough: Callable[[Epoch], bool] = lambda epoch: False
) -> Outcome:
    """Train until `is_enough` accepts an epoch, or for all epochs."""
    for epoch in runner.epochs():
        if is_enough(epoch):
            break
    return runner.outcome()


class Goal(NamedTuple):
    """A target test loss, and the maximum number of epochs."""

    loss: float
    epochs: int


def goal_of(quick: bool) -> Goal:
    """Return the goal of a run to a target loss."""
    return Goal(0.6, 4) if quick else Goal(0.28, 12)


def race_settings(quick: bool, **values: Any) -> TrainSettings:
    """Return the settings of a run to a target loss."""
    model, data = race(quick)
    return settings(quick, model=model, data=data, epochs=goal_of(quick).epochs, **values)


def race(quick: bool) -> tuple[str, str]:
    """Return the model and the data of a run to a target loss."""
    if quick:
        return _QUICK_MODEL, _QUICK_DATA
    return _RACE_MODEL, covtype_like(_NUM_OF_RACE)


@cache
def dataset(data: str, seed: int) -> Any:
    """Load data once."""
    return load(data, None, seed)


def seconds_to(goal: Goal, wanted: TrainSettings) -> dict[str, float | None]:
    """Train until the goal; return its time, as `reached` does, and the samples/s.

    All values are None if the loss is not finite.
    """
    try:
        with runner_of(wanted) as runner:
            outcome = trained(runner, lambda epoch: epoch.test_loss <= goal.loss)
    except InvalidInput as error:
        if not str(error).startswith("learning_rate: "):
            raise
        return {"seconds": None, "epoch_s": None, "samples_per_s": None}
    tested = [(epoch.seconds, epoch.test_loss) for epoch in outcome.epochs]
    num_classes = dataset(wanted.data, wanted.seed).num_classes
    return {**reached(goal, num_classes, tested), "samples_per_s": outcome.samples_per_s}


def reached(
    goal: Goal, num_classes: int, tested: Sequence[tuple[float, float]]
) -> dict[str, float | None]:
    """Return the seconds to the goal, None if it was missed, and the mean seconds of an epoch.

    `tested`: each epoch's seconds and its final test loss. The time at which the loss crosses the
    goal is interpolated.
    """
    epoch_s = sum(seconds for seconds, _ in tested) / len(tested)
    began_s, before = 0.0, log(num_classes)
    for seconds, loss in tested:
        if loss <= goal.loss:
            share = (before - goal.loss) / (before - loss)
            return {"seconds": began_s + seconds * share, "epoch_s": epoch_s}
        began_s, before = began_s + seconds, loss
    return {"seconds": None, "epoch_s": epoch_s}
