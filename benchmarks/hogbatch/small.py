"""The time of a sub-batch of few samples: in C++, and in torch, on one thread and on two at once.

A sub-batch is what a thread of a worker takes of its batch: forward, backward and the update of the
shared model. With two threads both have one of that size, in one process, and so with one GIL.
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
from paceline.exchange.setup import optimizer_by
from paceline.exchange.step import Learning
from paceline.strategies.hogbatch import dense_thread as dense
from paceline.strategies.hogbatch.replica import CpuReplica, tensors_of
from paceline.training.recipes.classification import class_loss
from paceline.training.recipes.named import recipe_of

SIZES, THREADS = (1, 4, 16, 64), (1, 2)
NATIVE, TORCH = "C++", "torch"
_REPEATS, _BATCHES = 15, 40
_RATE = 0.01  # so that thousands of updates leave finite values


def _own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the built-in loss, under a name by which the C++ does not know it."""
    return class_loss(outputs, targets)


_LOSSES = {NATIVE: class_loss, TORCH: _own_loss}


def measure(quick: bool) -> dict[str, Any]:
    """Return the seconds of a sub-batch by its samples, what computes it, and the threads at once.

    In each repeat every case has some batches, in turns. C++ computes all sizes here; in training
    it has as many as `DenseThread.most_samples`.
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
            if number:  # the first one warms up
                took[size, way, threads].append(seconds)
    return {
        str(size): {
            way: {str(threads): spread(took[size, way, threads]) for threads in THREADS}
            for way in _LOSSES
        }
        for size in SIZES
    }


def _trainers(quick: bool) -> tuple[Tensor, Mapping[tuple[str, int], Callable[[Tensor], float]]]:
    """Return the order of the samples, and what trains on a batch and returns its seconds."""
    wanted = settings(quick, workers="cpu:1", learning_rate=_RATE)
    recipe = recipe_of(wanted.model, wanted.data, wanted.seed)
    make = optimizer_by(recipe, wanted)

    def trainer(way: str, threads: int) -> Callable[[Tensor], float]:
        shared, learning = tensors_of(recipe.model()), Learning(_LOSSES[way])
        replica = CpuReplica(recipe, shared, make, 0, threads, learning=learning)

        def seconds(rows: Tensor) -> float:
            done = replica.train(rows, 1.0, None)
            return (done.ended_ns - done.started_ns) * 1e-9

        return seconds

    cases = product(_LOSSES, THREADS)
    return torch.randperm(len(recipe.samples)), {case: trainer(*case) for case in cases}
