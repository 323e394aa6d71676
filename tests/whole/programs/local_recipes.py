"""Recipes whose steps a test slows down by a file in the folder of the run, or makes fail."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.recipes.recipe import Recipe

SLOW, SLOW_S = Path("slow"), 0.1
WIDTH, NUM_SAMPLES = 6, 480


def data(num_samples: int = NUM_SAMPLES, seed: int = 0) -> TensorDataset:
    """Samples of a linear map, of which the first loss is some 200, and the least 0."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=source)
    return TensorDataset(inputs, 8 * inputs[:, :3] + 4)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if torch.is_grad_enabled() and SLOW.exists():
        time.sleep(SLOW_S)
    return (outputs - targets).square().mean()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16)
        self.dropout, self.last = nn.Dropout(0.05), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(inputs)).relu()))


def steady() -> Recipe:
    """Running means, random numbers and momentum: all that a worker has to keep, or take over."""
    return Recipe(
        model=Net,
        train=data(),
        test=data(60, seed=1),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.02),
    )


def failing() -> Recipe:
    """An optimizer that raises at its first step."""

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            raise RuntimeError("bang")

    return replace(steady(), optimizer=lambda parameters: Failing(parameters, 0.1))
