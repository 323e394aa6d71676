"""Replicas of strategy local without processes: their inner and outer steps against plain torch."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.core.settings import TrainSettings
from paceline.exchange.setup import setup_for
from paceline.links.group import Group
from paceline.recipes.named import given
from paceline.recipes.recipe import Recipe
from paceline.strategies.local.config import Local
from paceline.strategies.local.protocol import UnitsHeader
from paceline.strategies.local.rounds import Rounds
from paceline.strategies.local.trainer import Trainer
from paceline.strategies.local.units import Units

NUM_SAMPLES, BATCH_SIZE = 96, 12


def samples() -> TensorDataset:
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=source, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :2].sin() + inputs[:, 2:4])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2)
    ).double()


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def recipe() -> Recipe:
    return Recipe(
        model=network,
        train=samples(),
        loss=squares,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.8),
    )


@pytest.fixture
def settings() -> Iterator[TrainSettings]:
    with given(recipe()) as name:
        yield TrainSettings(model=name, batch_size=BATCH_SIZE, epochs=2)


def trainers(settings: TrainSettings, config: Local) -> list[Trainer]:
    made = []
    for rank in range(config.workers):
        alone = Group.alone(torch.device("cpu"), 30.0)
        group = replace(alone, rank=rank, world_size=config.workers)
        own = settings.model_copy(update={"workers": config.workers})
        made.append(Trainer(setup_for(own, group, None), config, group, seed=0))
    return made


def trained(settings: TrainSettings, config: Local) -> list[Trainer]:
    """Train all rounds, one worker after the other, and exchange at the end of each."""
    workers = trainers(settings, config)
    num_steps = settings.epochs * NUM_SAMPLES // BATCH_SIZE
    rounds: Rounds[int] = Rounds(Units(num_steps * config.workers), config)
    for number in range(config.workers):
        rounds.admit(number)
    for number in range(num_steps // config.sync_every):
        sent = []
        for place, worker in enumerate(workers):
            dealt = rounds.units_of(place, number)
            assert dealt is not None
            header = UnitsHeader(units=tuple(dealt.units), first_step=0.0, num_steps=1.0)
            worker.begin(number, header)
            worker.take(len(dealt.units))
            weight, gradient = worker.outgoing(0)
            buffers = worker.exchanged.encode(0, gradient)
            assert buffers is not None
            sent.append((weight, worker.exchanged.decode(0, buffers)))
            rounds.post(place, number, 0)
        for worker in workers:
            worker.receive(0, sent)
        assert rounds.complete() is not None
    assert rounds.is_over
    for worker in workers:
        worker.close()
    return workers


def parameters(worker: Trainer) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in worker.model.parameters()])


def test_averaging_after_every_step_is_synchronous_training(settings: TrainSettings) -> None:
    averaging = {"outer_learning_rate": 1.0, "outer_momentum": 0.0, "sync_every": 1}
    workers = trained(settings, Local(workers=3, **averaging))
    (single,) = trained(settings, Local(workers=1, **averaging))
    torch.testing.assert_close(parameters(workers[0]), parameters(single), rtol=1e-12, atol=1e-13)
