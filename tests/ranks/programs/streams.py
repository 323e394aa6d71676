"""Modules with side effects in forward: counters, memory banks and random numbers."""

import random

import numpy as np
import torch
from declared import plain, programs, trains
from torch import nn

from steps import backward, makes, mlp, squares, stepped, trained
from trial import seed


@makes(lambda: {"net": mlp(), "runs": 0, "ran": nn.Buffer(torch.zeros((), dtype=torch.int64))})
def counting(self, x):
    """Count forward passes, in a Python number and in a buffer."""
    self.runs += 1
    self.ran += 1
    return self.net(x) / self.runs


@makes(lambda: {"net": mlp(), "at": 0, "bank": nn.Buffer(torch.zeros(8, 3))})
def remembering(self, x):
    """Keep the last features, as contrastive learning with a memory bank does."""
    features = self.net(x)
    with torch.no_grad():
        self.bank[self.at : self.at + len(x)] = features
        self.at = (self.at + len(x)) % len(self.bank)
    return features @ self.bank.clone().T


@makes(lambda: {"net": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))})
def drawing(self, x):
    """Draw from the random streams of torch, NumPy and Python."""
    x = x + 0.1 * torch.from_numpy(np.random.standard_normal(x.shape))
    return self.net(x * random.random()) + 0.1 * torch.rand(3)


@makes(lambda: {"layers": nn.ModuleList(mlp(6, 6) for _ in range(4))})
def deep(self, x):
    """Stochastic depth: skip layers at random."""
    for layer in self.layers:
        if random.random() < 0.6:
            x = x + layer(x)
    return x


def forward_that_counts_itself(trial):
    """An extra forward pass by the wrapper would be counted and change the loss."""
    module = counting()
    for seen in trained(trial.wrap(module), squares(trial), steps=4):
        yield [seen, module.runs]


def memory_bank(trial):
    module = remembering()
    model = trial.wrap(module)
    for seen in trained(model, squares(trial), steps=4):
        yield [seen, module.at]


@trains(drawing)
def dropout_with_equal_seeds(trial, model):
    """With equal seeds, ranks drop the same units, as the wrapper draws no random numbers."""
    seed(5)
    yield from trained(model, squares(trial), steps=4)
    yield trial.evaluated(model)


@trains(deep, find_unused_parameters=True)
def stochastic_depth_alike_on_all_ranks(trial, model):
    """Other layers in each step, the same on all ranks, with find_unused_parameters."""
    random.seed(3)
    for step in stepped(model, 6):
        yield backward(model(trial.batch(step).requires_grad_()).square().mean())


@trains(deep, find_unused_parameters=True)
def stochastic_depth_of_each_rank(trial, model):
    for step in stepped(model, 6, lambda step: step % 2 == 0):
        yield backward(model(trial.batch(step).requires_grad_()).square().mean())


@trains(counting)
def forward_that_fails_once(trial, model):
    """A failed forward pass, before the first step or later, does not affect training."""
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))
    yield trial.refused(lambda: model(trial.batch(0, 4, 5)))
    yield from trained(model, squares(trial))


programs(
    __name__,
    {
        "memory_bank_of_each_rank": plain(remembering, steps=4, broadcast_buffers=False),
        "forward_that_draws_from_all_streams": plain(drawing, steps=4),
    },
)
