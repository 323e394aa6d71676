"""Modules whose forward pass does something besides: it counts, remembers, or draws at random."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trial import Trial, mlp, program, sgd, squares, trained


class Counting(nn.Module):
    """Counts its forward passes, in a Python number and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.runs = 0
        self.register_buffer("ran", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.ran += 1
        return self.net(x) / self.runs


class Remembering(nn.Module):
    """Keeps the last features, as contrastive learning with a memory bank does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.register_buffer("bank", torch.zeros(8, 3))
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        features = self.net(x)
        with torch.no_grad():
            self.bank[self.at : self.at + len(x)] = features
            self.at = (self.at + len(x)) % len(self.bank)
        return features @ self.bank.clone().T


class Drawing(nn.Module):
    """Draws from all three random streams."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape))
        return self.net(x * random.random()) + 0.1 * torch.rand(3)


class Deep(nn.Module):
    """Stochastic depth: layers are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.6:
                x = x + layer(x)
        return x


@program
def forward_that_counts_itself(trial: Trial) -> Iterator[Any]:
    """A forward pass that nobody asked for would be counted, and change the loss."""
    module = Counting()
    model = trial.wrap(module)
    for seen in trained(model, squares(trial), steps=4):
        yield [seen, module.runs]


@program
def memory_bank(trial: Trial) -> Iterator[Any]:
    module = Remembering()
    model = trial.wrap(module)
    for seen in trained(model, squares(trial), steps=4):
        yield [seen, module.at]


@program
def memory_bank_of_each_rank(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(Remembering(), broadcast_buffers=False)
    yield from trained(model, squares(trial), steps=4)


@program
def forward_that_draws_from_all_streams(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Drawing()), squares(trial), steps=4)


@program
def dropout_with_equal_seeds(trial: Trial) -> Iterator[Any]:
    """Both ranks drop the same units if the user seeds them alike: nobody else draws."""
    model = trial.wrap(Drawing())
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    yield from trained(model, squares(trial), steps=4)
    model.eval()
    with torch.no_grad():
        yield model(trial.batch(30))


@program
def stochastic_depth_alike_on_all_ranks(trial: Trial) -> Iterator[Any]:
    """Other layers in each step, the same on all ranks, with find_unused_parameters."""
    model = trial.wrap(Deep(), find_unused_parameters=True)
    random.seed(3)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(trial.batch(step).requires_grad_()).square().mean()
        loss.backward()
        yield loss
        optimizer.step()


@program
def stochastic_depth_of_each_rank(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(Deep(), find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(trial.batch(step).requires_grad_()).square().mean().backward()
        yield step
        optimizer.step()


@program
def forward_that_fails_once(trial: Trial) -> Iterator[Any]:
    """An error before the first step is the user's own; afterwards all goes on."""
    model = trial.wrap(Counting())
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))
