"""Set up and time runs on the paper's network for covtype and similar data."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import log
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch, Outcome
from paceline.core.settings import TrainSettings
from paceline.exchange.session import Progress, TrainingSession
from paceline.links.group import Group
from paceline.records.settings import configuration, validated_settings
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.run import HogbatchRunner, start
from paceline.strategies.hogbatch.statistics import BatchRecord
from paceline.training.data import load
from paceline.training.models import find
from papers.lookalike import covtype_like

_MODEL, NUM_SAMPLES = "covtype-mlp", 125_000  # a fifth are test samples
RACE_MODEL, NUM_OF_RACE = "mlp-54-256-256-2", 25_000  # smaller, for a hundred runs
QUICK_MODEL, QUICK_DATA = "mlp-64-128-10", "digits"


def settings(quick: bool, **values: Any) -> TrainSettings:
    """Return a run's settings; `quick` selects a small network and data, `values` override."""
    model = QUICK_MODEL if quick else _MODEL
    data = QUICK_DATA if quick else covtype_like(NUM_SAMPLES)
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


def race(quick: bool, **values: Any) -> TrainSettings:
    """Return the settings of a run to a target loss."""
    model = QUICK_MODEL if quick else RACE_MODEL
    return settings(quick, **({"model": model, "data": race_data(quick)} | values))


def race_data(quick: bool) -> str:
    """Return the data spec of a run to a target loss."""
    return QUICK_DATA if quick else covtype_like(NUM_OF_RACE)


@cache
def dataset(quick: bool, seed: int) -> Any:
    """Load the data of a run to a target loss."""
    return load(race_data(quick), None, seed)


def race_model(quick: bool) -> nn.Module:
    """Build the network of a run to a target loss, with the weights of seed 0."""
    torch.manual_seed(0)
    network = find(QUICK_MODEL if quick else RACE_MODEL)
    return network.build(dataset(quick, 0).num_classes)


class Goal(NamedTuple):
    """A target test loss, and the maximum number of epochs."""

    loss: float
    epochs: int


def seconds_to(goal: Goal, wanted: TrainSettings) -> dict[str, float | None]:
    """Train until the goal; return the seconds of training, and other figures of the run.

    `epoch_s`: mean time of an epoch. `seconds` is None if the run misses the goal; all values are
    None if the loss is not finite.
    """
    start_loss = log(dataset(wanted.data == QUICK_DATA, wanted.seed).num_classes)
    try:
        with runner_of(wanted) as runner:
            outcome = trained(runner, lambda epoch: epoch.test_loss <= goal.loss)
    except InvalidInput as error:
        if not str(error).startswith("learning_rate: "):
            raise
        return {"seconds": None, "epoch_s": None, "samples_per_s": None}
    tested = [(epoch.seconds, epoch.test_loss) for epoch in outcome.epochs]
    return {**reached(goal, start_loss, tested), "samples_per_s": outcome.samples_per_s}


def reached(
    goal: Goal, start_loss: float, tested: list[tuple[float, float]]
) -> dict[str, float | None]:
    """Return the seconds to the goal, and the mean seconds of an epoch."""
    epoch_s = sum(seconds for seconds, _ in tested) / len(tested)
    return {"seconds": _crossing_s(goal, start_loss, tested), "epoch_s": epoch_s}


def _crossing_s(goal: Goal, start_loss: float, tested: list[tuple[float, float]]) -> float | None:
    """Interpolate the time at which the test loss crosses the goal; None if it never does.

    `tested`: each epoch's seconds and its final test loss. `start_loss`: loss before training.
    """
    began_s, before = 0.0, start_loss
    for seconds, loss in tested:
        if loss <= goal.loss:
            return began_s + seconds * (before - goal.loss) / (before - loss)
        began_s, before = began_s + seconds, loss
    return None


def gaps_s(batches: list[BatchRecord]) -> list[float]:
    """Return the pauses, in seconds, between each worker's consecutive batches of an epoch."""
    last: dict[int, BatchRecord] = {}
    found = []
    for batch in batches:
        before = last.get(batch.worker)
        if before is not None and before.epoch == batch.epoch:
            found.append(batch.started_s - before.ended_s)
        last[batch.worker] = batch
    return found
