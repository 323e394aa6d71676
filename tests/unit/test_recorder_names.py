"""Recorded spans have the names of the plan, whatever a model does with its layers."""

import pytest
import torch
from torch import Tensor, nn

from paceline.core.compare import conform
from paceline.core.machine import Machine
from paceline.core.strategy import Window
from paceline.exchange.step import SGD, Share, train_step
from paceline.models import describe
from paceline.models.networks import LeNet5
from paceline.record.clock import HostClock
from paceline.record.merge import merge
from paceline.record.recorder import Recorder
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan

MACHINE = Machine.model_validate(
    {
        "name": "one",
        "hosts": [
            {
                "name": "host",
                "cores": 1,
                "memory_bytes": 1,
                "memory_bandwidth_bytes_per_s": 1,
                "source": "made up",
            }
        ],
        "devices": [
            {
                "name": "cpu0",
                "host": "host",
                "kind": "cpu",
                "flops_per_s": 1,
                "memory_bytes": 1,
                "memory_bandwidth_bytes_per_s": 1,
                "source": "made up",
            }
        ],
    }
)


class Tied(nn.Module):
    """Two modules with one weight, the second without anything of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.one(x).relu()))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(x).relu()))


class Unused(nn.Module):
    """Layers that no gradient reaches: one is never entered, one does not lead to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.one = nn.Linear(8, 8), nn.Linear(8, 8)
        self.aside, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        self.aside(x)
        return self.last(x)


class HalfUsed(nn.Module):
    """A layer of which one of two parameters gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.one(x)
        return self.last(x * self.one.bias)


class Attention(nn.Module):
    """torch's attention uses the weights of `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        return self.last(self.attention(x, x, x, need_weights=False)[0].squeeze(1))


class Functional(nn.Module):
    """No module with parameters is ever entered but the model's children's weights are used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.one.weight @ self.last.weight.t() + self.last.bias + self.one.bias[:3]


class Branched(nn.Module):
    """Two branches, run in the opposite order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        right = self.right(x)
        return self.last(self.left(x) + right)


@pytest.mark.parametrize(
    "kind", [LeNet5, Tied, Twice, Unused, HalfUsed, Attention, Functional, Branched]
)
def test_recorded_steps_conform_to_the_plan(kind):
    torch.manual_seed(0)
    model = kind()
    inputs = torch.randn(2, 1, 32, 32) if kind is LeNet5 else torch.randn(2, 8)
    workload = describe(model, inputs)
    recorder = Recorder(HostClock(), "cpu0", 0)
    recorder.start_trace(model)
    optimizer, share = SGD().optimizer(model), Share(inputs, torch.tensor([0, 2]), 1.0)
    for _ in range(2):
        train_step(model, optimizer, iter([share]), recorder)
    recorder.stop_trace()
    tasks = plan(workload, MACHINE, AllReduce(workers=1), Window(2))
    assert conform(tasks, merge([recorder.spans()], "measured")) == []
