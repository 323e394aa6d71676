"""The exchange of some gradients and nothing else, to be measured."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.exchange.replica import Replica
from paceline.models.paced import PacedSGD


class _Ready(torch.autograd.Function):
    """Gradients that are ready at once: all that its backward pass takes is the exchange."""

    @staticmethod
    def forward(ctx: Any, after: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return after.detach()

    @staticmethod
    def backward(ctx: Any, *of_after: Tensor) -> tuple[Tensor | None, ...]:
        # Aliases, which autograd need not copy.
        return of_after[0], None, *(gradient.detach() for gradient in ctx.gradients)


class _Layer(nn.Module):
    """A layer that computes nothing and has its parameters' gradients at once."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__()
        zeros = [torch.zeros(nbytes // 4, device=device) for nbytes in sizes]
        self.weights = nn.ParameterList(nn.Parameter(one) for one in zeros)
        self.gradients = [torch.zeros_like(one) for one in zeros]

    def forward(self, after: Tensor) -> Tensor:
        result: Tensor = _Ready.apply(after, self.gradients, *self.weights)  # type: ignore[no-untyped-call]
        return result


class Gradients(nn.Module):
    """Layers whose parameters have these bytes of gradients, ready in this order of layers."""

    def __init__(self, sizes: Sequence[Sequence[int]], device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(one, device) for one in reversed(sizes))
        self._device = device

    def forward(self) -> Tensor:
        """Return a scalar whose derivatives by all parameters are already known."""
        scalar = torch.zeros((), device=self._device)
        for layer in self.layers:
            scalar = layer(scalar)
        return scalar


class Probe:
    """Exchanges the float32 gradients of some layers each time it is called.

    `sizes` are the bytes of each parameter of each layer.

    All ranks must make it, call it and close it together.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
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
