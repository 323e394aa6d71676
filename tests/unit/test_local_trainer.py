"""Replicas of strategy local without processes: their inner and outer steps against plain torch."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from paceline.core.settings import TrainSettings
from paceline.exchange.setup import setup_for
from paceline.links.group import Group
from paceline.models.networks import MLP
from paceline.recipes.named import given
from paceline.recipes.recipe import Recipe
from paceline.strategies.local.config import Local
from paceline.strategies.local.protocol import UnitsHeader
from paceline.strategies.local.rounds import Rounds
from paceline.strategies.local.trainer import Trainer
from paceline.strategies.local.units import Units

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 96, 12, 2


def recipe() -> Recipe:
    source = torch.Generator().manual_seed(3)
    inputs = torch.randn(NUM_SAMPLES, 5, generator=source, dtype=torch.float64)
    return Recipe(
        model=lambda: MLP((5, 7, 6, 2)).double(),
        train=TensorDataset(inputs, inputs[:, :2].sin() + inputs[:, 2:4]),
        loss=mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.8),
    )


def trainer(rank: int, config: Local) -> Trainer:
    group = replace(Group.alone(torch.device("cpu"), 30.0), rank=rank, world_size=config.workers)
    with given(recipe()) as name:
        settings = TrainSettings(
            model=name, batch_size=BATCH_SIZE, epochs=EPOCHS, workers=config.workers
        )
        return Trainer(setup_for(settings, group, None), config, group, seed=0)


def trained(config: Local) -> Tensor:
    """Train all rounds, one worker after the other, and exchange at the end of each."""
    workers = [trainer(rank, config) for rank in range(config.workers)]
    num_steps = EPOCHS * NUM_SAMPLES // BATCH_SIZE
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
    return nn.utils.parameters_to_vector(workers[0].model.parameters()).detach()


def test_averaging_after_every_step_is_synchronous_training() -> None:
    averaging = {"outer_learning_rate": 1.0, "outer_momentum": 0.0, "sync_every": 1}
    three, one = (trained(Local(workers=workers, **averaging)) for workers in (3, 1))
    torch.testing.assert_close(three, one, rtol=1e-12, atol=1e-13)
