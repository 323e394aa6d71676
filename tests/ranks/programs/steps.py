"""Networks, losses and training loops for programs."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trial import Trial

Loss = Callable[[nn.Module, int], Tensor]


def squares(trial: Trial) -> Loss:
    """Return the mean square of a model's outputs, as a loss of (model, step)."""
    return lambda model, step: model(trial.batch(step)).square().mean()


def sgd(module: nn.Module | Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum and decay, which move parameters with zero gradients, not None."""
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def stepped(
    trained: nn.Module | torch.optim.Optimizer | list[torch.optim.Optimizer],
    steps: int | Iterable[Any],
    set_to_none: Callable[[Any], bool] = lambda step: True,
    every: int = 1,
) -> Iterator[Any]:
    """Yield steps; zero gradients before every so many, and call the optimizers after them."""
    if isinstance(trained, nn.Module):
        trained = sgd(trained)
    optimizers = trained if isinstance(trained, list) else [trained]
    for number, step in enumerate(range(steps) if isinstance(steps, int) else steps, 1):
        for optimizer in optimizers if (number - 1) % every == 0 else ():
            optimizer.zero_grad(set_to_none(step))
        yield step
        for optimizer in optimizers if number % every == 0 else ():
            optimizer.step()


def zeroed(model: nn.Module, steps: int) -> Iterator[int]:
    """Yield steps, and zero gradients before each."""
    for step in range(steps):
        model.zero_grad()
        yield step


def backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def learn(trial: Trial, model: nn.Module, step: int) -> Tensor:
    """Run backward of the mean-square loss, and return the loss."""
    return backward(squares(trial)(model, step))


def alone(trial: Trial, model: nn.Module, step: int) -> Tensor:
    """Run `learn` in no_sync, without an exchange."""
    with model.no_sync():
        return learn(trial, model, step)


def trained(
    model: nn.Module,
    loss_of: Loss,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 3,
    *zeroing: Any,
) -> Iterator[Any]:
    """Train, and yield each step's loss between backward and the optimizer's step."""
    for step in stepped(optimizer or model, steps, *zeroing):
        yield {"loss": backward(loss_of(model, step))}


def joint(value: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum (or another `op`) of a value over all ranks, by a collective of the user."""
    total = value.detach().clone()
    dist.all_reduce(total, op)
    return total


class Made(nn.Module):
    """A module with the given parts and `run(self, *inputs)` as its forward pass."""

    def __init__(self, run: Callable[..., Any], parts: dict[str, Any]) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.run(self, *inputs, **named)


def module_of(**parts: Any) -> Callable[[Callable[..., Any]], Made]:
    """Return a decorator that makes a module with these parts from a forward function."""
    return lambda run: Made(run, parts)


def makes(parts: Callable[..., dict[str, Any]]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that turns a forward function into a maker of its module."""
    return lambda run: lambda *known: Made(run, parts(*known))


def mlp(*sizes: int) -> nn.Sequential:
    sizes = sizes or (6, 8, 3)
    layers: list[nn.Module] = []
    for one, other in pairwise(sizes):
        layers += [nn.Linear(one, other), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def differences(trial: Trial) -> Loss:
    """Return the mean-square difference of two forward passes, as a loss of (model, step)."""
    return lambda model, step: (
        (model(trial.batch(step)) - model(trial.batch(10 + step))).square().mean()
    )
