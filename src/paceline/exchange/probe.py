"""An exchange of a given size and nothing else, to be measured."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.exchange.replica import Replica
from paceline.models.paced import PacedSGD


class _Ready(torch.autograd.Function):
    """A gradient that is ready at once: all that its backward pass takes is the exchange."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.detach(), None  # an alias of its own, which autograd need not copy


class Gradient(nn.Module):
    """A module of one parameter that computes nothing and has a gradient at once."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(nbytes // 4, device=device))
        self.gradient = torch.zeros_like(self.parameter)

    def forward(self) -> Tensor:
        """Return a scalar whose derivative by the parameter is already known."""
        result: Tensor = _Ready.apply(self.parameter, self.gradient)  # type: ignore[no-untyped-call]
        return result


class Probe:
    """Exchanges float32 gradients of `nbytes` through a replica, each time that it is called.

    All ranks must make it, call it and close it together.
    """

    def __init__(
        self, nbytes: int, device: torch.device, replicate: Callable[[nn.Module], Replica]
    ) -> None:
        self._module = Gradient(nbytes, device)
        self._replica = replicate(self._module)
        # A strategy may send parameters after the update: here they are told of one.
        self._optimizer = PacedSGD(self._module.parameters(), 0.0)

    def __call__(self) -> None:
        """Exchange once."""
        self._replica().backward()
        self._optimizer.step()
        self._module.zero_grad()

    def close(self) -> None:
        """Give back what the exchange holds."""
        self._replica.close()
