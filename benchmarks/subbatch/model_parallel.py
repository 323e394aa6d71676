"""Measure the accuracy of a split head with encoded activations and activation gradients.

Each rank computes the whole body for its samples, and some outputs of each head layer for all
ranks' samples. Head layers exchange values by `paceline.codecs.all_gather`, as in handwritten user
code. The tasks are those of benchmarks/codecs, with a head of two layers.
"""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import learning
from learning import FLOAT32, NUM_RANKS, Task, accuracies, fit, tasks
from paceline.codecs import all_gather
from paceline.codecs.quantization import TABLES
from paceline.links.group import Group
from ranks import on_ranks

_PRINTED = "Section 3.4 prints F(4,4) = 0.54, p = 0.71 for model parallelism on MNIST."


def part(quick: bool) -> dict[str, Any]:
    """Return the accuracies of two ranks, and an F-test."""
    return on_ranks(Path(__file__).parent, "model_parallel", NUM_RANKS, quick)


def text(figures: dict[str, Any]) -> str:
    """Return the tables of accuracies."""
    return f"{learning.text(figures)}\n\n{_PRINTED}"


class _Head(nn.Module):
    """Linear layers with ReLU between them; this rank computes some outputs of each layer."""

    def __init__(self, widths: tuple[int, ...], group: Group) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for inputs, outputs in pairwise(widths):
            layer = nn.Linear(inputs, outputs)  # equal on all ranks: same random seed
            rows = slice(*_ends(outputs, group))
            for name, whole in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(whole.detach()[rows].clone()))
            self.layers.append(layer)

    def forward(self, x: Tensor, codec: str | None) -> Tensor:
        """Return the scores of all ranks' samples; the scores are exchanged without a codec."""
        rows = all_gather(x, codec, activation_gradients=codec)
        for layer in self.layers[:-1]:
            rows = all_gather(layer(rows).relu().t(), codec, activation_gradients=codec).t()
        return all_gather(self.layers[-1](rows).t()).t()


def _ends(count: int, group: Group) -> tuple[int, int]:
    """Return the start and the end of this rank's share of `count` items."""
    first, end = (count * place // group.world_size for place in (group.rank, group.rank + 1))
    return first, end


def measure(group: Group, quick: bool) -> dict[str, Any]:
    """Return the accuracies of all tasks and types, by seed."""
    known = tasks(256)
    codecs = dict.fromkeys(known, (FLOAT32, *TABLES))
    return accuracies(known, codecs, quick, partial(_trained, group))


def _trained(group: Group, task: Task, epochs: int, name: str, seed: int) -> float:
    """Train from scratch, and return the test accuracy.

    The test uses no codec, like a test in a single process.
    """
    torch.manual_seed(seed)
    body, head = task.body(), _Head(task.widths, group)
    codec = None if name == FLOAT32 else name

    def backward(inputs: Tensor, targets: Tensor) -> None:
        scores = head(body(inputs), codec)
        # All ranks compute the same loss; divided, the losses sum to a single process's loss.
        (cross_entropy(scores, all_gather(targets)) / group.world_size).backward()
        for parameter in body.parameters():
            dist.all_reduce(parameter.grad)

    fit(task, epochs, seed, group, [*body.parameters(), *head.parameters()], backward)
    inputs, targets = task.test
    own = slice(*_ends(len(targets), group))
    with torch.no_grad():
        found = head(body(inputs[own]), None).argmax(1)
    return float((found == targets).double().mean())
