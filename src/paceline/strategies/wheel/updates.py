"""One update of all parameters by an optimizer of torch, when both halves' gradients are there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel.halves import Halves


def apply(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    divisor: float,
) -> None:
    """Take a step with these gradients and the learning rates divided; no gradients are left."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    try:
        with _slowed(optimizer, divisor):
            optimizer.step()
    finally:
        optimizer.zero_grad(set_to_none=True)


@contextmanager
def _slowed(optimizer: torch.optim.Optimizer, divisor: float) -> Iterator[None]:
    """Have the learning rates divided, inside."""
    groups = [] if divisor == 1 else optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate / divisor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def check_optimizer(optimizer: torch.optim.Optimizer, halves: Halves, decay: float) -> None:
    """Raise InvalidInput unless the optimizer can update all of the halves' parameters."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise InvalidInput(
            f"optimizer: {kind} cannot be used, as it needs more than one dense gradient a step"
        )
    if not (isfinite(decay) and decay >= 0):
        raise InvalidInput(f"staleness_decay: {decay}; it must be a number from 0 up")
    if decay and any("lr" not in group for group in optimizer.param_groups):
        raise InvalidInput(f"staleness_decay: {kind} has no learning rate to divide")
    updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
    names = (*halves.body_names, *halves.head_names)
    parameters = (*halves.body_parameters, *halves.head_parameters)
    for name, parameter in zip(names, parameters, strict=True):
        if id(parameter) not in updated:
            raise InvalidInput(f"optimizer: {kind} does not have parameter {name!r} of the model")
