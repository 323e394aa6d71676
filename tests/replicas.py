"""Float64 models that ranks train, and their oracles in plain torch on all ranks' samples."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import codec_training
from paceline import DataParallel
from paceline.links.devices import gpus

EXCHANGES = ("allreduce", "tree", "host")
PLACES = [*((one, "pair") for one in EXCHANGES), ("host", "pair_on_gpus")]
MARKED = [*PLACES[:3], pytest.param(*PLACES[3], marks=pytest.mark.slow)]
each_place = pytest.mark.parametrize(("exchange", "place"), MARKED)
Loss = Callable[[nn.Module, int, int], Tensor]  # arguments: model, rank, step
sgd = codec_training.momentum


class Net(nn.Module):
    """A model that applies equal layers in the given `order`."""

    def __init__(self, order: str = "abc", layers: str = "abc") -> None:
        super().__init__()
        self.order = order
        for name in layers:
            setattr(self, name, nn.Linear(6, 6).double())

    def forward(self, x: Tensor, order: str = "") -> Tensor:
        for name in order or self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


def device() -> torch.device:
    """Return the device of this rank's models: a simulated GPU, if there is one.

    The current device stays the first one.
    """
    return gpus()[int(os.environ["LOCAL_RANK"])] if gpus() else torch.device("cpu")


def build(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a module with this rank's initial values, and one with those of rank 0."""
    with torch.device(device()):  # created there, because moving would leave hooks behind
        torch.manual_seed(dist.get_rank())
        module = make()
        torch.manual_seed(0)
        return module, make()


def parallel_of(module: nn.Module, exchange: str, **options: Any) -> DataParallel:
    return DataParallel(module, **{"exchange": exchange, "chunk": 1, "deadline_s": 20.0} | options)


def batch(rank: int, step: int, *shape: int) -> Tensor:
    """Return the samples of a rank in a step, reproducible on any rank."""
    generator = torch.Generator().manual_seed(1 + 1000 * rank + step)
    return torch.randn(shape or (4, 6), generator=generator, dtype=torch.float64).to(device())


def square(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).square().mean()


def mean(loss: Loss, oracle: nn.Module, step: int) -> Tensor:
    """Return the loss over the samples of all ranks, which a single process would minimise."""
    return torch.stack([loss(oracle, rank, step) for rank in range(dist.get_world_size())]).mean()


def train(
    parallel: nn.Module,
    oracle: nn.Module,
    steps: Iterable[int],
    before: Callable[[int], object] = lambda step: None,
) -> None:
    """Train a model on all ranks, and its oracle here; call `before` in each step."""
    optimizers = sgd(parallel), sgd(oracle)
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        before(step)
        square(parallel, dist.get_rank(), step).backward()
        mean(square, oracle, step).backward()
        for optimizer in optimizers:
            optimizer.step()


def check(parallel: nn.Module, oracle: nn.Module) -> str:
    """Compare a model with its oracle and with other ranks; return a digest of its bits."""
    pairs = zip(parallel.parameters(), oracle.parameters(), strict=True)
    apart = max(distance(*pair) for pair in pairs)
    assert apart <= 1e-12, apart
    own = bits(parallel)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    assert set(everyone) == {own}
    return own


def distance(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest value; NaN if one is NaN."""
    apart = (one.detach().double() - other.detach().double()).abs().max()
    return float(apart / other.detach().double().abs().max().clamp(min=1e-3))


def bits(model: nn.Module) -> str:
    return codec_training.bits(model.parameters())
