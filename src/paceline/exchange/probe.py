"""The exchange of some gradients and nothing else, to be measured."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.exchange.replica import Replica
from paceline.models.paced import PacedSGD


class _Ready(torch.autograd.Function):
    """A gradient that is ready at once: all that its backward pass takes is the exchange."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return after.detach()

    @staticmethod
    def backward(ctx: Any, *of_after: Tensor) -> tuple[Tensor, Tensor, None]:
        return of_after[0], ctx.gradient.detach(), None  # an alias, which autograd need not copy


class _Layer(nn.Module):
    """A layer of one parameter that computes nothing and has a gradient at once."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(nbytes // 4, device=device))
        self.gradient = torch.zeros_like(self.parameter)

    def forward(self, after: Tensor) -> Tensor:
        result: Tensor = _Ready.apply(after, self.parameter, self.gradient)  # type: ignore[no-untyped-call]
        return result


class Gradients(nn.Module):
    """Layers of these bytes of gradients, which become ready in this order."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(nbytes, device) for nbytes in reversed(sizes))
        self._device = device

    def forward(self) -> Tensor:
        """Return a scalar whose derivatives by all parameters are already known."""
        scalar = torch.zeros((), device=self._device)
        for layer in self.layers:
            scalar = layer(scalar)
        return scalar


class Probe:
    """Exchanges float32 gradients of layers of these `sizes`, in bytes, each time it is called.

    All ranks must make it, call it and close it together.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        device: torch.device,
        replicate: Callable[[nn.Module], Replica],
    ) -> None:
        self._module = Gradients(sizes, device)
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
