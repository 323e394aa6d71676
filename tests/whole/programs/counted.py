"""A model for strategy hogbatch that counts how often updates use each sample.

A file `kill`, `nan` or `stop` in the current folder triggers a fault: the worker that gets the last
sample removes the file, and then kills itself, returns NaN, or stops itself.
"""

import os
import signal
from math import nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.exchange.session import Progress

NUM_SAMPLES = 600
HIT = NUM_SAMPLES - 1  # speed trials use the first samples, and never this one


def taken(name: str) -> bool:
    """Remove a trigger file; return whether this process removed it."""
    try:
        Path(name).rename(f"{name}.{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


class Counted(nn.Module):
    """Has a row of two scores per sample; the input of a sample is its number."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(NUM_SAMPLES, 2))

    def forward(self, numbers: Tensor) -> Tensor:
        rows = numbers[:, 0].long()
        is_hit = self.training and bool((rows == HIT).any())
        for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
            if is_hit and taken(name):
                os.kill(os.getpid(), number)
        scores = self.uses[rows]
        return scores * nan if is_hit and taken("nan") else scores


@torch.no_grad()
def count(parameters: list[nn.Parameter]) -> None:
    """Add one to the rows that have a gradient."""
    for parameter in parameters:
        rows = parameter.grad.abs().sum(1).nonzero()[:, 0]
        parameter[rows] += 1


def recipe() -> Any:
    from paceline.training.data.dataset import TensorSamples
    from paceline.training.recipes.losses import class_loss
    from paceline.training.recipes.recipe import Recipe

    numbers = torch.arange(float(NUM_SAMPLES))[:, None]
    samples = TensorSamples(numbers, torch.zeros(NUM_SAMPLES, dtype=torch.int64))
    return Recipe(model=Counted, train=samples, loss=class_loss)


class Silent(Progress):
    """Counts samples, and shows nothing."""

    def __init__(self) -> None:
        self.counted = self.total = 0

    def begin(self, total: int, unit: str) -> None:
        self.total = total

    def advance(self, count: int = 1) -> None:
        self.counted += count


def num_memories() -> int:
    """Count this process's descriptors of shared memory."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(str(link).startswith("/memfd:") for link in links)


def session_of(workers: str, progress: Any, config: dict[str, Any], **settings: Any) -> Any:
    from paceline.core.settings import TrainSettings
    from paceline.exchange.session import TrainingSession
    from paceline.links.group import Group
    from paceline.strategies.hogbatch import STRATEGY
    from paceline.strategies.hogbatch.config import Hogbatch, parse_workers

    known = {"strategy": "hogbatch", "learning_rate": 0.1, "momentum": 0.0, "profile_s": 0.02}
    asked = TrainSettings(**known | {"workers": workers, "keep_all": True} | settings)
    own = Hogbatch(workers=len(parse_workers(workers)), **config)
    alone = Group.alone(torch.device("cpu"), asked.deadline_s)
    return TrainingSession(asked, STRATEGY, own, "counted", alone, progress)


def prepare(file: str) -> None:
    """Let workers import modules of a file's folder, and find a simulated GPU."""
    os.environ["PYTHONPATH"] = str(Path(file).parent)
    os.environ["PACELINE_SIMULATED_GPUS"] = "1"
