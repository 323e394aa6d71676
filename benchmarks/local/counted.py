"""Define a recipe that counts each process's computed inner steps in files of the run.

Each step adds a byte to its process's file, so that steps of killed processes are counted, too. A
step sleeps 20 ms instead of computing a larger model, because all processes share two cores.
"""

import os
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.training.recipes.recipe import Recipe

STEP_S = 0.02
NUM_SAMPLES, WIDTH = 4800, 32
_COUNTS = Path("computed")


@cache
def _file() -> int:
    _COUNTS.mkdir(exist_ok=True)
    return os.open(_COUNTS / str(os.getpid()), os.O_CREAT | os.O_WRONLY | os.O_APPEND)


def num_computed(folder: Path) -> int:
    """Return the number of inner steps that all processes have computed in `folder` so far."""
    return sum(path.stat().st_size for path in (folder / _COUNTS).glob("*"))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error; in training, also sleep and count a step."""
    if torch.is_grad_enabled():
        time.sleep(STEP_S)
        os.write(_file(), b".")
    return (outputs - targets).square().mean()


def _samples(count: int, seed: int) -> TensorDataset:
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, WIDTH, generator=source)
    return TensorDataset(inputs, 3 * (inputs[:, :8] * inputs[:, 8:16]).tanh() + 2)


def recipe() -> Recipe:
    """Return a perceptron of 100,000 parameters that learns a product of its inputs."""
    return Recipe(
        model=lambda: nn.Sequential(
            nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)
        ),
        train=_samples(NUM_SAMPLES, 0),
        test=_samples(480, 1),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 1e-3),
    )
