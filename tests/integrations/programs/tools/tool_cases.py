"""A model, its data and comparisons for cases that two ranks or a single process run."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, BATCH = 32, 4
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
ROUNDING = 1e-5
MOVED = 100 * ROUNDING  # a larger distance shows that a model was trained


class Net(nn.Module):
    """A network with buffers; `forward(odd=True)` uses another last layer."""

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
    """Return the largest difference between two models' parameters and buffers."""
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    names = [name for name in ours if ours[name].is_floating_point()]
    return max(float((ours[name] - theirs[name]).abs().max()) for name in names)


def wraps(model: nn.Module) -> list[str]:
    """Return the names of a module's wrappers, from the outermost."""
    found = []
    while isinstance(model, DistributedDataParallel):
        found.append(type(model).__name__)
        model = model.module
    return found


def exchange_of(wrapped: nn.Module) -> dict[str, Any]:
    """Return a model's wrappers, its exchange and the number of exchanges."""
    found: dict[str, Any] = {"wraps": wraps(wrapped)}
    if hasattr(wrapped, "statistics"):
        statistics = wrapped.statistics()
        found |= {"exchange": statistics.exchange, "exchanges": statistics.num_steps}
    return found


def check_exchange(found: dict[str, Any], num_exchanges: int) -> None:
    """Assert that one wrapper exchanged gradients in host memory; a single process has no peer."""
    if NUM_RANKS > 1:
        expected = {"wraps": ["DataParallel"], "exchange": "host", "exchanges": num_exchanges}
        assert found == expected
