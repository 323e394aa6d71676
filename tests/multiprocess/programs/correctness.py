"""Whole trainings with each exchange, compared with one process; see ranks.main for the output."""

import hashlib
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data import load
from ranks import Place, batch, bits, case, device, main, settled

NUM_STEPS, NUM_STEPS_ON_GPU = 50, 30
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
        *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)),
    )


def squared_error(model: nn.Module, samples: Tensor) -> Tensor:
    return (model(samples) - samples.sin().sum(1, keepdim=True)).square().mean()


def learned(place: Place, name: str, dtype: torch.dtype, **options: object):
    """Train on this rank's samples and, beside it, one process on the samples of all.

    `bits` is a digest of the parameters after every step.
    """
    module, oracle = place.build(lambda: network().to(dtype))
    parallel = place.parallel(module, **options)
    optimizers = [OPTIMIZERS[name](model.parameters()) for model in (parallel, oracle)]
    digest = hashlib.sha256()
    for step in range(NUM_STEPS if device().type == "cpu" else NUM_STEPS_ON_GPU):
        samples = [batch(rank, step, dtype=dtype) for rank in range(place.size)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        squared_error(parallel, samples[place.rank]).backward()
        squared_error(oracle, torch.cat(samples)).backward()
        for optimizer in optimizers:
            optimizer.step()
        digest.update(bits(parallel).encode())
    chosen = [[trial.chunk for trial in parallel.trials], parallel.statistics().exchange]
    chain = digest.hexdigest()[:16]
    return settled(parallel, oracle) | {"bits": chain, "chosen": chosen, "why": parallel.why}


@case
def sgd_float64(place: Place):
    return learned(place, "sgd", torch.float64)


@case
def momentum_float64(place: Place):
    return learned(place, "momentum", torch.float64)


@case
def adam_float64(place: Place):
    return learned(place, "adam", torch.float64)


@case
def sgd_float32(place: Place):
    return learned(place, "sgd", torch.float32)


@case
def momentum_float32(place: Place):
    return learned(place, "momentum", torch.float32)


@case
def adam_float32(place: Place):
    return learned(place, "adam", torch.float32)


@case
def adam_float32_again(place: Place):
    return learned(place, "adam", torch.float32)


@case
def adam_float32_with_chunks_of_two(place: Place):
    return learned(place, "adam", torch.float32, chunk=2)


@case
def adam_float32_with_chunks_of_all(place: Place):
    return learned(place, "adam", torch.float32, chunk=100)


@case
def adam_float32_while_chunks_are_sought(place: Place):
    return learned(place, "adam", torch.float32, chunk="auto")


@case
def adam_float32_with_an_exchange_of_its_own_choice(place: Place):
    return learned(place, "adam", torch.float32, chunk="auto", exchange="auto")


@case
def digits(place: Place):
    """The losses of all steps of two epochs, each step on 32 samples of every rank."""
    module, _ = place.build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()))
    module.append(nn.Linear(32, 10))
    parallel = place.parallel(module)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    train, losses = load("digits").train, []
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(3)).tolist()
    for start in range(0, 2 * len(order), 32 * place.size):
        indices = [order[(start + 32 * place.rank + i) % len(order)] for i in range(32)]
        inputs, targets = train.__getitems__(indices)
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "bits": bits(parallel)}


@case
def large(place: Place):
    """More bytes of gradients than a container's /dev/shm often has."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(18 * 2**20))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    module = Wide()
    parallel = place.parallel(module)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(torch.tensor(1.0 + place.rank)).backward()
        optimizer.step()
    right = torch.equal(module.weight, torch.full_like(module.weight, -4.5))
    return {"bytes": parallel.statistics().bytes_sent // 3, "right": right}


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2].split(","))
