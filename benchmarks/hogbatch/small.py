"""Time small sub-batches in C++ and in torch, on one thread and on two concurrent threads.

A sub-batch is one thread's share of a worker's batch; its time covers forward, backward and the
update of the shared model. Two threads run sub-batches of equal size in one process, with one GIL.
"""

from collections.abc import Callable, Mapping
from itertools import product
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from cases import settings
from torch import Tensor

from figures import spread
from paceline.core.machine import DeviceKind
from paceline.exchange.setup import optimizer_by
from paceline.exchange.step import Learning
from paceline.strategies.hogbatch import dense_thread as dense
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.replica import CpuReplica, tensors_of
from paceline.training.recipes.losses import class_loss
from paceline.training.recipes.named import recipe_of

SIZES, THREADS = (1, 4, 16, 64), (1, 2)
NATIVE, TORCH = "C++", "torch"
_REPEATS, _BATCHES = 15, 40
_RATE = 0.01  # small, so that weights stay finite over thousands of updates


def _own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the built-in loss; the C++ code does not support this copy, so torch runs."""
    return class_loss(outputs, targets)


_LOSSES = {NATIVE: class_loss, TORCH: _own_loss}


def measure(quick: bool) -> dict[str, Any]:
    """Return the seconds of a sub-batch by size, implementation and number of threads.

    Each repeat runs some batches of every case in turn. Here C++ computes all sizes; in training it
    computes sub-batches of up to `DenseThread.most_samples`.
    """
    with patch.object(dense, "_FEW_SAMPLES", dense.MOST_SAMPLES):
        order, train = _trainers(quick)
    repeats, batches = (3, 3) if quick else (_REPEATS, _BATCHES)
    cases = list(product(SIZES, _LOSSES, THREADS))
    took = {case: list[float]() for case in cases}
    for number in range(repeats + 1):
        for size, way, threads in cases:
            rows = order[: batches * size * threads].split(size * threads)
            seconds = mean(map(train[way, threads], rows))
            if number:  # the first repeat is a warm-up
                took[size, way, threads].append(seconds)
    return {
        str(size): {
            way: {str(threads): spread(took[size, way, threads]) for threads in THREADS}
            for way in _LOSSES
        }
        for size in SIZES
    }


def _trainers(quick: bool) -> tuple[Tensor, Mapping[tuple[str, int], Callable[[Tensor], float]]]:
    """Return the samples' order, and for each case a function that trains and times a batch."""
    wanted = settings(quick, workers="cpu:1", learning_rate=_RATE)
    recipe = recipe_of(wanted.model, wanted.data, wanted.seed)
    make = optimizer_by(recipe, wanted)

    def trainer(way: str, threads: int) -> Callable[[Tensor], float]:
        shared, learning = tensors_of(recipe.model()), Learning(_LOSSES[way])
        spec = WorkerSpec(DeviceKind.CPU, threads)
        replica = CpuReplica(recipe, shared, make, learning, 0, spec)

        def seconds(rows: Tensor) -> float:
            done = replica.train(rows, 1.0, None)
            return (done.ended_ns - done.started_ns) * 1e-9

        return seconds

    cases = product(_LOSSES, THREADS)
    return torch.randperm(len(recipe.samples)), {case: trainer(*case) for case in cases}
