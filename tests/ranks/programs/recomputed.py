"""Activations that are computed again, and weights and layers that are used more than once."""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from trial import Trial, mlp, program, squares, trained


class Tied(nn.Module):
    """A language model whose embedding is its head's weight, with layers in checkpoints."""

    def __init__(self, use_reentrant: bool | None = None, times: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(mlp(6, 6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.use_reentrant, self.times = use_reentrant, times

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(self.times):
            for layer in self.layers:
                x = x + self._run(layer, x)
        return self.head(x)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.use_reentrant)


def tokens(trial: Trial, step: int) -> Tensor:
    return trial.batch(step, 4, 5).mul(10).long().abs() % 7


def language(trial: Trial) -> Any:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = tokens(trial, step)
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return loss_of


@program
def tied_embedding(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Tied()), language(trial))


@program
def tied_embedding_with_checkpoints(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Tied(use_reentrant=False)), language(trial))


@program
def tied_embedding_with_reentrant_checkpoints(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Tied(use_reentrant=True)), language(trial))


@program
def layers_used_twice(trial: Trial) -> Iterator[Any]:
    """As ALBERT: the same layers again and again."""
    yield from trained(trial.wrap(Tied(times=3)), language(trial))


@program
def layers_used_twice_in_checkpoints(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Tied(use_reentrant=False, times=2)), language(trial))


@program(
    raises="RuntimeError", better="a parameter may become ready more than once in a backward pass"
)
def layers_used_twice_in_reentrant_checkpoints(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(Tied(use_reentrant=True, times=2)), language(trial))


@program
def layers_used_twice_in_reentrant_checkpoints_of_a_static_graph(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(Tied(use_reentrant=True, times=2), static_graph=True)
    yield from trained(model, language(trial), steps=4)


@program
def checkpoints_of_a_static_graph(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(Tied(use_reentrant=False), static_graph=True)
    yield from trained(model, language(trial), steps=4)


@program
def sequence_of_checkpoints_with_dropout(trial: Trial) -> Iterator[Any]:
    """What is computed again draws the same numbers, and leaves the random streams alone."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    yield from trained(trial.wrap(Segments()), squares(trial))
