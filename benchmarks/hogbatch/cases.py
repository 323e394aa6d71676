"""Set up and time runs on the paper's network for covtype, and on a smaller one, to a loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf, log
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
from papers.lookalike import covtype_like

_MODEL, _NUM_SAMPLES = "covtype-mlp", 125_000  # a fifth are test samples
_NUM_OF_RACE = 25_000
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


class Race(NamedTuple):
    """A model, its number of classes, a target test loss, and the maximum number of epochs."""

    model: str
    num_classes: int
    loss: float
    epochs: int


_RACE = Race("mlp-54-256-256-2", 2, 0.28, 12)  # a small model, for a hundred runs
_QUICK_RACE = Race(_QUICK_MODEL, 10, 0.6, 4)


def seconds_to_loss(quick: bool, **values: Any) -> dict[str, float]:
    """Train until the target loss; return the seconds to it, infinity if missed, and samples/s.

    The time at which the loss crosses the target is interpolated. It is infinite, with 0 samples/s,
    if the learning rate is too high.
    """
    race = _QUICK_RACE if quick else _RACE
    data = _QUICK_DATA if quick else covtype_like(_NUM_OF_RACE)
    wanted = settings(quick, model=race.model, data=data, epochs=race.epochs, **values)
    try:
        with runner_of(wanted) as runner:
            outcome = trained(runner, lambda epoch: epoch.test_loss <= race.loss)
    except InvalidInput as error:
        if not str(error).startswith("learning_rate: "):
            raise
        return {"seconds": inf, "samples_per_s": 0.0}
    return {"seconds": _reached(race, outcome.epochs), "samples_per_s": outcome.samples_per_s}


def _reached(race: Race, epochs: Sequence[Epoch]) -> float:
    began_s, before = 0.0, log(race.num_classes)
    for epoch in epochs:
        if epoch.test_loss <= race.loss:
            share = (before - race.loss) / (before - epoch.test_loss)
            return began_s + epoch.seconds * share
        began_s, before = began_s + epoch.seconds, epoch.test_loss
    return inf
