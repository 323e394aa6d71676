"""What ranks learn whose activations and errors travel by each type: a body on all, a split head.

Each rank has its samples and the whole body, and some outputs of every layer of the head, on which
it works for the samples of all. `paceline.codecs.all_gather` is all that joins them: what a user
writes by hand. The tasks are those of benchmarks/codecs, with a head of two layers.
"""

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from learning import FLOAT32, Task, accuracies, fit, tasks
from paceline.codecs import all_gather
from paceline.codecs.quantization import TABLES
from paceline.links.group import Group


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
    known = tasks(256)
    codecs = dict.fromkeys(known, (FLOAT32, *TABLES))
    return accuracies(known, codecs, quick, partial(_trained, group))


def _trained(group: Group, task: Task, epochs: int, name: str, seed: int) -> float:
    """Train from scratch, and return the share of test samples that are recognised.

    They are tested as a single process would: nothing is encoded.
    """
    torch.manual_seed(seed)
    body, head = task.body(), _Head(task.widths, group)
    codec = None if name == FLOAT32 else name

    def backward(inputs: Tensor, targets: Tensor) -> None:
        scores = head(body(inputs), codec)
        # The same loss on all ranks: their sum is that of one process.
        (cross_entropy(scores, all_gather(targets)) / group.world_size).backward()
        for parameter in body.parameters():
            dist.all_reduce(parameter.grad)

    fit(task, epochs, seed, group, [*body.parameters(), *head.parameters()], backward)
    inputs, targets = task.test
    own = slice(*_ends(len(targets), group))
    with torch.no_grad():
        found = head(body(inputs[own]), None).argmax(1)
    return float((found == targets).double().mean())
