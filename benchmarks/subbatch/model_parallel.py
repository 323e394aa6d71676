"""What ranks learn whose activations and errors travel by each type: a body on all, a split head.

Each rank has its samples and the whole body, and some outputs of every layer of the head, on which
it works for the samples of all. `paceline.codecs.all_gather` is all that joins them: what a user
writes by hand. The tasks are those of benchmarks/codecs, with a head of two layers.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

sys.path.append(str(Path(__file__).parents[1] / "codecs"))  # after our own

from accuracy import FLOAT32, moved

from paceline.codecs import all_gather
from paceline.codecs.quantization import TABLES
from paceline.links.group import Group
from paceline.training.data import ShardedBatches, load

_TYPES = (FLOAT32, *TABLES)
_NUM_SEEDS, _NUM_CLASSES = 5, 10
_NUM_TRAIN, _NUM_TEST = 3000, 2000

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Task:
    """What is learned; a seed decides the initial weights and the order of samples."""

    body: Callable[[], nn.Module]
    widths: tuple[int, ...]  # of the head: from what the body hands on to the scores
    train: Samples
    test: Samples
    batch_size: int
    epochs: int
    learning_rate: float


class _Head(nn.Module):
    """Linear layers with rectifiers between them, of which this rank has some outputs."""

    def __init__(self, widths: tuple[int, ...], group: Group) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for inputs, outputs in pairwise(widths):
            layer = nn.Linear(inputs, outputs)  # with the same random numbers on all ranks
            rows = slice(*_ends(outputs, group))
            for name, whole in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(whole.detach()[rows].clone()))
            self.layers.append(layer)

    def forward(self, x: Tensor, codec: str | None) -> Tensor:
        """Return the scores of all ranks' samples on each rank; they travel as they are."""
        rows = all_gather(x, codec, activation_gradients=codec)
        for layer in self.layers[:-1]:
            rows = all_gather(layer(rows).relu().t(), codec, activation_gradients=codec).t()
        return all_gather(self.layers[-1](rows).t()).t()


def _ends(count: int, group: Group) -> tuple[int, int]:
    """Return where this rank's share of so many begins, and where it ends."""
    first, end = (count * place // group.world_size for place in (group.rank, group.rank + 1))
    return first, end


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the accuracies of all tasks and types, one for each seed."""
    figures = {}
    for name, task in _tasks().items():
        seeds, epochs = (range(2), 1) if quick else (range(_NUM_SEEDS), task.epochs)
        num_parameters = sum(one.numel() for one in task.body().parameters())
        layers = pairwise(task.widths)
        figures[name] = {
            "batch_size": task.batch_size,
            "epochs": epochs,
            "learning_rate": task.learning_rate,
            "num_parameters": num_parameters + sum((one + 1) * other for one, other in layers),
            "accuracies": {
                codec: [_trained(task, epochs, codec, seed, group) for seed in seeds]
                for codec in _TYPES
            },
        }
    return figures


def _tasks() -> dict[str, _Task]:
    digits = load("digits")
    train, test = moved(_NUM_TRAIN, 1), moved(_NUM_TEST, 2)
    return {
        "digits": _Task(
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()),
            (64, 256, _NUM_CLASSES),
            digits.train[:],
            digits.test[:],
            64,
            25,
            0.1,
        ),
        "3x32x32": _Task(_convolutions, (64, 256, _NUM_CLASSES), train, test, 64, 20, 0.05),
    }


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, size in ((3, 16, 5), (16, 32, 3), (32, 64, 3)):
        layers += [nn.Conv2d(inputs, outputs, size, stride=2, padding=size // 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _trained(task: _Task, epochs: int, name: str, seed: int, group: Group) -> float:
    """Train from scratch, and return the share of test samples that are recognised.

    They are tested as a single process would: nothing is encoded.
    """
    torch.manual_seed(seed)
    body, head = task.body(), _Head(task.widths, group)
    codec = None if name == FLOAT32 else name
    _train(task, epochs, seed, body, head, codec, group)
    inputs, targets = task.test
    own = slice(*_ends(len(targets), group))
    with torch.no_grad():
        found = head(body(inputs[own]), None).argmax(1)
    return float((found == targets).double().mean())


def _train(
    task: _Task,
    epochs: int,
    seed: int,
    body: nn.Module,
    head: _Head,
    codec: str | None,
    group: Group,
) -> None:
    inputs, targets = task.train
    batches = ShardedBatches(len(targets), task.batch_size, group.rank, group.world_size, seed)
    parameters = [*body.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, task.learning_rate, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, epochs * len(batches))
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            scores = head(body(inputs[rows]), codec)
            # The same loss on all ranks: their sum is that of one process.
            loss = cross_entropy(scores, all_gather(targets[rows])) / group.world_size
            loss.backward()
            for parameter in body.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
