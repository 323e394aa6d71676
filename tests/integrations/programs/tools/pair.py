"""Cases that two ranks, or a process alone, run one after another.

Each prints what came of it as a line of JSON.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

Case = Callable[[], dict[str, Any]]
CASES: dict[str, Case] = {}
NUM_SAMPLES, BATCH = 32, 4
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def cases(**functions: Case) -> None:
    """Cases of one expression, by name."""
    CASES.update(functions)


def main() -> None:
    warnings.simplefilter("ignore")
    for name in sys.argv[1:] or CASES:
        try:
            outcome = CASES[name]()
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        line = json.dumps([name, int(os.environ.get("RANK", "0")), outcome])
        os.write(1, f"\n{line}\n".encode())  # at once, beside what the tools write


class Net(nn.Module):
    """Has buffers, and an odd way that is taken only if asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.odd = nn.Linear(8, 1)

    def forward(self, inputs: Tensor, odd: bool = False) -> Tensor:
        hidden = self.norm(self.first(inputs)).tanh()
        return self.odd(hidden) if odd else self.last(hidden) + 0 * self.odd(hidden)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def batches() -> DataLoader:
    return DataLoader(samples(), batch_size=BATCH)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' values, of parameters and of buffers."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if ours[name].is_floating_point()]
    return max(float((ours[name] - theirs[name]).abs().max()) for name in names)


def wraps(model: nn.Module) -> list[str]:
    """The names of the wrappers around a module, from the outermost."""
    found = []
    while isinstance(model, DistributedDataParallel):
        found.append(type(model).__name__)
        model = model.module
    return found


def told_of(wrapped: nn.Module) -> dict[str, Any]:
    """The wrappers around a model, and what they have exchanged."""
    found: dict[str, Any] = {"wraps": wraps(wrapped)}
    if hasattr(wrapped, "statistics"):
        statistics = wrapped.statistics()
        found |= {"exchange": statistics.exchange, "exchanges": statistics.num_steps}
    return found


def said_by(function: Callable[[], object]) -> str:
    """What a refusal says."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class Counting:
    """A communication hook that averages, and counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        self.calls += 1
        values = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(values, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
