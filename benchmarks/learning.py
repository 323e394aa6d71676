"""Compare test accuracies after training with encoded values and with float32, by an F-test.

The tasks are digits and synthetic 3x32x32 images: an image is the sum of one of ten smooth patterns
(its class), a weaker pattern of another class, both randomly shifted with wrap-around, and noise.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.optim.lr_scheduler import CosineAnnealingLR

from figures import table
from paceline.codecs.quantization import TABLES
from paceline.links.group import Group
from paceline.training.data import ShardedBatches, load

FLOAT32, NUM_RANKS = "float32", 2
_NUM_SEEDS, _NUM_CLASSES = 5, 10
_CHANNELS, _SIDE, _COARSE_SIDE = 3, 32, 8
_OTHER, _NOISE = 0.8, 2.0  # amplitudes relative to the class's pattern
_NUM_TRAIN, _NUM_TEST = 3000, 2000
Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model's layers, its data, and the settings of training.

    `widths`: the body's output size, then the linear layers' output sizes, with ReLU between them.
    """

    body: Callable[[], nn.Module]
    widths: tuple[int, ...]
    train: Samples
    test: Samples
    batch_size: int
    epochs: int
    learning_rate: float


def tasks(*hidden: int) -> dict[str, Task]:
    """Return the tasks by name, with linear layers of these widths between body and output."""
    digits, widths = load("digits"), (64, *hidden, _NUM_CLASSES)
    shown = digits.train[:], digits.test[:]
    drawn = moved(_NUM_TRAIN, 1), moved(_NUM_TEST, 2)

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())

    return {
        "digits": Task(perceptron, widths, *shown, 64, 25, 0.1),
        "3x32x32": Task(_convolutions, widths, *drawn, 64, 20, 0.05),
    }


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs, size in ((_CHANNELS, 16, 5), (16, 32, 3), (32, 64, 3)):
        layers += [nn.Conv2d(inputs, outputs, size, stride=2, padding=size // 2), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def moved(count: int, seed: int) -> Samples:
    """Draw `count` samples of the task 3x32x32."""
    patterns = _patterns()
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(_NUM_CLASSES, (count,), generator=generator)
    steps = torch.randint(1, _NUM_CLASSES, (count,), generator=generator)
    others = (targets + steps) % _NUM_CLASSES
    moves = torch.randint(_SIDE, (count, 2, 2), generator=generator).tolist()
    inputs = _NOISE * torch.randn((count, *patterns.shape[1:]), generator=generator)
    for i, (move, other_move) in enumerate(moves):
        inputs[i] += patterns[targets[i]].roll(move, (1, 2))
        inputs[i] += _OTHER * patterns[others[i]].roll(other_move, (1, 2))
    return inputs / (1 + _OTHER**2 + _NOISE**2) ** 0.5, targets


def _patterns() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.randn((_NUM_CLASSES, _CHANNELS, _COARSE_SIDE, _COARSE_SIDE), generator=generator)
    patterns = interpolate(coarse, (_SIDE, _SIDE), mode="bilinear")
    return patterns / patterns.square().mean((1, 2, 3), keepdim=True).sqrt()


def fit(
    task: Task,
    epochs: int,
    seed: int,
    group: Group,
    parameters: Iterable[nn.Parameter],
    backward: Callable[[Tensor, Tensor], None],
) -> None:
    """Train by SGD with momentum; `backward` computes the gradients of a rank's samples."""
    inputs, targets = task.train
    batches = ShardedBatches(len(targets), task.batch_size, group.rank, group.world_size, seed)
    optimizer = torch.optim.SGD(parameters, task.learning_rate, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, epochs * len(batches))
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            backward(inputs[rows], targets[rows])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def accuracies(
    known: Mapping[str, Task],
    codecs: Mapping[str, Sequence[str]],
    quick: bool,
    trained: Callable[[Task, int, str, int], float],
) -> dict[str, Any]:
    """Return the settings of each task, the test accuracies of each codec by seed, and an F-test.

    `trained(task, epochs, codec, seed)` trains a model and returns its accuracy.
    """
    figures = {}
    for name, task in known.items():
        seeds, epochs = (range(2), 1) if quick else (range(_NUM_SEEDS), task.epochs)
        num_parameters = sum((one + 1) * other for one, other in pairwise(task.widths))
        num_parameters += sum(one.numel() for one in task.body().parameters())
        found = {
            codec: [trained(task, epochs, codec, seed) for seed in seeds] for codec in codecs[name]
        }
        figures[name] = {
            "batch_size": task.batch_size,
            "epochs": epochs,
            "learning_rate": task.learning_rate,
            "num_parameters": num_parameters,
            "accuracies": found,
            "test_of_all_types": _tested(found),
        }
    return figures


def _tested(accuracies: Mapping[str, Sequence[float]]) -> dict[str, Any] | None:
    """Test whether float32's mean and those of the 8-bit types, if there are any, are equal.

    It is a one-way analysis of variance.
    """
    from scipy.stats import f_oneway

    groups = [accuracies[name] for name in (FLOAT32, *TABLES) if name in accuracies]
    if len(groups) == 1:
        return None
    found = f_oneway(*groups)
    degrees = [len(groups) - 1, sum(map(len, groups)) - len(groups)]
    return {"f": float(found.statistic), "p": float(found.pvalue), "degrees": degrees}


def text(figures: dict[str, Any]) -> str:
    """Return a table for each task."""
    return "\n\n".join(_of_task(name, task) for name, task in figures.items())


def _of_task(name: str, task: dict[str, Any]) -> str:
    known = task["accuracies"]
    lines = [
        (codec, *(f"{100 * one:.2f}" for one in (*own, mean(own), stdev(own))))
        for codec, own in known.items()
    ]
    title = (
        f"{name}: test accuracy in %, {task['num_parameters']:,} parameters, "
        f"{task['epochs']} epochs, batches of {task['batch_size']} on {NUM_RANKS} ranks, learning "
        f"rate {task['learning_rate']}"
    )
    seeds = (f"seed {seed}" for seed in range(len(known[FLOAT32])))
    found = table(title, ["codec", *seeds, "mean", "deviation"], lines)
    together = task["test_of_all_types"]
    if together is None:
        return found
    between, within = together["degrees"]
    said = f"F({between},{within}) = {together['f']:.2f}, p = {together['p']:.2f}"
    return f"{found}\n\nfloat32 and the four 8-bit types together: {said}."
