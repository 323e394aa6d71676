"""Recipes whose steps a test slows down, or makes fail, by files in the folder of the run."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.recipes.recipe import Recipe

SLOW, HANG, STOP = Path("slow"), Path("hang"), Path("stop")
POISON, POISON_ALL = Path("poison"), Path("poison-all")
SLOW_S, HANG_S = 0.1, 3600.0
WIDTH, NUM_SAMPLES = 6, 480


def data(num_samples: int = NUM_SAMPLES, seed: int = 0) -> TensorDataset:
    """Samples of a linear map, of which the first loss is some 200, and the least 0."""
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, WIDTH, generator=source)
    return TensorDataset(inputs, 8 * inputs[:, :3] + 4)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    found = (outputs - targets).square().mean()
    if not torch.is_grad_enabled():
        return found
    if SLOW.exists():
        time.sleep(SLOW_S)
    if _takes(HANG):
        time.sleep(HANG_S)
    if POISON_ALL.exists() or _takes(POISON):
        return found * torch.nan
    return found


def _takes(flag: Path) -> bool:
    """Take the flag away; of all workers that try, one does."""
    try:
        flag.rename(f"{flag}ed")
    except FileNotFoundError:
        return False
    return True


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, width), nn.BatchNorm1d(width)
        self.dropout, self.last = nn.Dropout(0.05), nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.dropout(self.norm(self.first(inputs)).relu()))


class Stopping(nn.Linear):
    """A layer that stops the process of `paceline worker` once, if there is a flag."""

    def forward(self, inputs: Tensor) -> Tensor:
        if "worker" in sys.argv and _takes(STOP):
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(inputs)


def steady(width: int = 16, num_samples: int = NUM_SAMPLES) -> Recipe:
    """Running means, random numbers and momentum: all that a worker has to keep, or take over."""
    return Recipe(
        model=lambda: Net(width),
        train=data(num_samples),
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


def untestable() -> Recipe:
    """Test samples that are NaN: the loss on them is, and all parameters are finite."""
    recipe = steady()
    inputs, targets = data(60, seed=1).tensors
    return replace(recipe, test=TensorDataset(inputs * torch.nan, targets))


def line() -> Recipe:
    """A model that diverges without end at a rate that is too high: it has no normalisation."""
    return Recipe(model=lambda: nn.Linear(WIDTH, 3), train=data(), test=data(60, 1), loss=loss)


def stopping() -> Recipe:
    """A model whose first layer stops its process, in a worker of any strategy."""
    return replace(
        line(), model=lambda: nn.Sequential(Stopping(WIDTH, 16), nn.ReLU(), nn.Linear(16, 3))
    )
