"""What two ranks learn with each codec: DistributedDataParallel with `paceline.ddp_hook`.

Digits, and a task of CIFAR's shape: which of ten smooth patterns, moved by any number of pixels in
both directions, lies beneath a weaker one of another class and noise. One bit is tried at a lower
learning rate, too: what error feedback adds later must still fit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from paceline import ddp_hook
from paceline.codecs.codec import Codec
from paceline.codecs.feedback import OneBit
from paceline.codecs.four_bit import FOUR_BIT_TABLES
from paceline.codecs.quantization import TABLES
from paceline.core.wire_format import FEEDBACK
from paceline.links.group import Group
from paceline.training.data import ShardedBatches, load

FLOAT32 = "float32"
CODECS: Mapping[str, str | Codec | None] = {
    FLOAT32: None,
    **{name: name for name in TABLES},
    **{name: name for name in FOUR_BIT_TABLES},
    **{name + FEEDBACK: name + FEEDBACK for name in FOUR_BIT_TABLES},
    "onebit": "onebit",
    "onebit without error feedback": OneBit(),
}
_ONE_BIT = (FLOAT32, "onebit", "onebit without error feedback")
_NUM_SEEDS, _NUM_CLASSES = 5, 10
_CHANNELS, _SIDE, _COARSE_SIDE = 3, 32, 8
_OTHER, _NOISE = 0.8, 2.0  # amplitudes beside that of the pattern to be found
_NUM_TRAIN, _NUM_TEST = 3000, 2000

Samples = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Task:
    """What is learned; a seed decides the initial weights and the order of samples."""

    build: Callable[[], nn.Module]
    train: Samples
    test: Samples
    batch_size: int
    epochs: int
    learning_rate: float
    codecs: tuple[str, ...] = tuple(CODECS)


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the accuracies of all tasks and codecs, one for each seed."""
    figures = {}
    for name, task in _tasks().items():
        seeds, epochs = (range(2), 1) if quick else (range(_NUM_SEEDS), task.epochs)
        figures[name] = {
            "batch_size": task.batch_size,
            "epochs": epochs,
            "learning_rate": task.learning_rate,
            "num_parameters": sum(one.numel() for one in task.build().parameters()),
            "accuracies": {
                codec: [_trained(task, epochs, codec, seed, group) for seed in seeds]
                for codec in task.codecs
            },
        }
    return figures


def _tasks() -> dict[str, _Task]:
    digits = load("digits")
    train, test = moved(_NUM_TRAIN, 1), moved(_NUM_TEST, 2)
    return {
        "digits": _Task(_perceptron, _all(digits.train), _all(digits.test), 64, 25, 0.1),
        "3x32x32": _Task(_convolutions, train, test, 64, 20, 0.05),
        "3x32x32, slowly": _Task(_convolutions, train, test, 64, 50, 0.01, _ONE_BIT),
    }


def _all(samples: Any) -> Samples:
    inputs, targets = samples[:]
    return inputs, targets


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, _NUM_CLASSES))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(_CHANNELS, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, _NUM_CLASSES),
    )


def moved(count: int, seed: int) -> Samples:
    """Return so many samples of the task of CIFAR's shape."""
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
    coarse = (_NUM_CLASSES, _CHANNELS, _COARSE_SIDE, _COARSE_SIDE)
    patterns = interpolate(
        torch.randn(coarse, generator=generator), (_SIDE, _SIDE), mode="bilinear"
    )
    return patterns / patterns.square().mean((1, 2, 3), keepdim=True).sqrt()


def _trained(task: _Task, epochs: int, name: str, seed: int, group: Group) -> float:
    """Train from scratch with a codec, and return the share of test samples that are recognised."""
    torch.manual_seed(seed)
    model = DistributedDataParallel(task.build())
    codec = CODECS[name]
    state = None
    if codec is not None:
        state, hook = ddp_hook(codec)
        model.register_comm_hook(state, hook)
    _train(task, epochs, seed, model, group)
    if state is not None:
        state.close()
    inputs, targets = task.test
    with torch.no_grad():
        found = model.module(inputs).argmax(1)
    return float((found == targets).double().mean())


def _train(task: _Task, epochs: int, seed: int, model: nn.Module, group: Group) -> None:
    inputs, targets = task.train
    batches = ShardedBatches(len(targets), task.batch_size, group.rank, group.world_size, seed)
    optimizer = torch.optim.SGD(model.parameters(), task.learning_rate, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, epochs * len(batches))
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        for rows in batches:
            cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
