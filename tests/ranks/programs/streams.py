"""Modules with side effects in forward: counters, memory banks and random numbers."""

import random

import numpy as np
import torch
from declared import plain, programs, trains
from torch import Tensor, nn

from steps import backward, mlp, normed, squares, stepped, trained


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
    """Draws from the random streams of torch, NumPy and Python."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape))
        return self.net(x * random.random()) + 0.1 * torch.rand(3)


class Deep(nn.Module):
    """Stochastic depth: skips layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 0.6:
                x = x + layer(x)
        return x


def memory_bank(trial):
    module = Remembering()
    model = trial.wrap(module)
    for seen in trained(model, squares(trial), steps=4):
        yield [seen, module.at]


@trains(Deep, find_unused_parameters=True)
def stochastic_depth_of_each_rank(trial, model):
    for step in stepped(model, 6, lambda step: step % 2 == 0):
        yield backward(model(trial.batch(step).requires_grad_()).square().mean())


@trains(normed)
def forward_that_fails_once(trial, model):
    """A failed forward pass, before the first step or later, does not affect training."""
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))


programs(
    __name__,
    {
        "memory_bank_of_each_rank": plain(Remembering, steps=4, broadcast_buffers=False),
        "forward_that_draws_from_all_streams": plain(Drawing, steps=4),
    },
)
