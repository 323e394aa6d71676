"""Activation checkpointing, and weights and layers that are used more than once."""

from typing import Any

import torch.nn.functional as F
from declared import plain, programs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from steps import mlp, module_of, squares, trained
from trial import Run, Trial


class Tied(nn.Module):
    """A language model with tied embedding and head, and layers in checkpoints."""

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


def _language(trial: Trial) -> Any:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        x = trial.batch(step, 4, 5).mul(10).long().abs() % 7
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return loss_of


def tied(*known: Any, **options: Any) -> Run:
    """Return a program that trains `Tied(*known)`."""
    return plain(lambda: Tied(*known), loss=_language, **options)


def sequence_of_checkpoints_with_dropout(trial):
    """Recomputation draws the same random numbers and restores the random streams."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]

    segments = module_of(layers=nn.Sequential(*layers))(
        lambda self, x: checkpoint_sequential(self.layers, 2, x, use_reentrant=False)
    )
    yield from trained(trial.wrap(segments), squares(trial))


programs(
    __name__,
    {
        "tied_embedding": tied(),
        "tied_embedding_with_checkpoints": tied(False),
        "tied_embedding_with_reentrant_checkpoints": tied(True),
        # As in ALBERT: the same layers are applied repeatedly.
        "layers_used_twice": tied(None, 3),
        "layers_used_twice_in_checkpoints": tied(False, 2),
        "layers_used_twice_in_reentrant_checkpoints_of_a_static_graph": tied(
            True, 2, steps=4, static_graph=True
        ),
        "checkpoints_of_a_static_graph": tied(False, steps=4, static_graph=True),
    },
)
programs(
    __name__,
    {"layers_used_twice_in_reentrant_checkpoints": tied(True, 2)},
    raises="RuntimeError",
    better="a parameter may become ready more than once in a backward pass",
)
