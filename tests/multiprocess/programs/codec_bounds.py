"""A model to train with encoded gradients, and how far its gradients may be from exact ones."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.codecs.blockwise import table
from paceline.codecs.four_bit import FOUR_BIT_TABLES, four_bit_table
from ranks import Place, batch, bits, oracle_of

ROUNDING = 1e-5  # of float32, in sums of some hundred values


def network() -> nn.Module:
    """Layers whose gradients leave gaps of all sizes to the next multiple of 64 bytes."""
    return nn.Sequential(
        *(nn.Linear(20, 301), nn.Tanh(), nn.Linear(301, 33), nn.Tanh()),
        *(nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 3)),
    )


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(rank, step, 16, 20, dtype=torch.float32).to(dtype)).square().mean()


def momentum(module: nn.Module | Iterator[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Momentum and decay move a parameter whose gradient is zero, but not one that has none."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, **options)


def state(module: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """A digest of the parameters and of what optimizers remember."""
    tensors = list(module.parameters())
    for optimizer in optimizers:
        for kept in optimizer.state.values():
            tensors += [value for value in kept.values() if isinstance(value, Tensor)]
    return bits(tensors)


def largest_error(codec: str) -> float:
    """The most that a value in [-1, 1] may lose: half of a gap, or what is above the table."""
    chosen = four_bit_table(codec) if codec in FOUR_BIT_TABLES else table(codec)
    magnitudes = chosen.magnitudes.double()
    return float(torch.cat([magnitudes.diff() / 2, 1 - magnitudes[-1:]]).max())


def means(place: Place, model: nn.Module, losses: Callable[[int], list[Tensor]]):
    """The mean gradients of all ranks' losses, and the largest gradient of any rank."""
    parameters = list(model.parameters())
    every = [
        torch.autograd.grad(torch.stack(losses(rank)).sum(), parameters)
        for rank in range(place.size)
    ]
    largest = max(float(g.abs().max()) for gradients in every for g in gradients)
    return [torch.stack(one).float().mean(0) for one in zip(*every, strict=True)], largest


def compared(
    place: Place, parallel: nn.Module, codec: str, steps: int = 5, accumulates: bool = True
) -> dict:
    """Train, every other step with two micro-batches if told to; compare each step's gradients.

    What is encoded on the way to its owner loses at most E times the largest gradient G; their mean
    is at most (1 + E) G, and loses E times that on its way to all: (2 + E) E G together. `worst` is
    relative to that, with some room for rounding.
    """
    oracle = oracle_of(getattr(parallel, "module", parallel))
    optimizer, error = momentum(parallel), largest_error(codec)
    rounding = max(ROUNDING, torch.finfo(next(oracle.parameters()).dtype).eps)
    worst, chain, sent = 0.0, [], []
    for step in range(steps):
        optimizer.zero_grad()
        batches = [step, 50 + step] if accumulates and step % 2 else [step]
        for one in batches:
            with parallel.no_sync() if one != batches[-1] else nullcontext():
                loss_of(parallel, place.rank, one).backward()
        expected, largest = means(
            place, oracle, lambda rank, of=batches: [loss_of(oracle, rank, one) for one in of]
        )
        bound = largest * (error * (2 + error) + rounding)
        found = [parameter.grad for parameter in parallel.parameters()]
        apart = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
        worst = max(worst, *(gap / bound for gap in apart))
        chain.append(bits(found))
        if hasattr(parallel, "statistics"):
            sent.append(parallel.statistics().bytes_sent)
        optimizer.step()
        oracle.load_state_dict(parallel.module.state_dict())
    return {"worst": worst, "bits": chain, "sent": sent}
