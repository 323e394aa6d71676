"""Optimizers that update each value by its own gradient, as rows of a weight need it."""

from itertools import chain

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.exchange.step import Optimize

_NUM_STEPS = 3


def check_row_wise(optimizer: Optimize) -> None:
    """Raise InvalidInput if an optimizer updates rows of a weight otherwise than all of it.

    It is tried: on a small layer, and beside it on the halves of that.
    """
    source = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64, device="cpu")

    weight, bias, rows = drawn(4, 3), drawn(4), (slice(0, 2), slice(2, 4))
    whole, *halves = (_layer(weight[part], bias[part]) for part in (slice(0, 4), *rows))
    optimizers = [optimizer(layer) for layer in (whole, *halves)]
    for _ in range(_NUM_STEPS):
        gradients = drawn(4, 3), drawn(4)
        for layer, part in zip((whole, *halves), (slice(0, 4), *rows), strict=True):
            layer.weight.grad, layer.bias.grad = (one[part].clone() for one in gradients)
        for one in optimizers:
            one.step()
    before = torch.cat((weight.flatten(), bias))
    moved = torch.cat([one.detach().flatten() for one in whole.parameters()]) - before
    pairs = zip(*(half.parameters() for half in halves), strict=True)
    of_halves = chain.from_iterable(pairs)
    apart = torch.cat([one.detach().flatten() for one in of_halves]) - before
    if not torch.allclose(moved, apart, rtol=1e-6, atol=1e-14):
        raise InvalidInput(
            f"optimizer: {type(optimizers[0]).__name__} updates a value by more than its own "
            "gradients, and with subbatch a worker has some rows of the head's weights; take one "
            "that does not, as adamw or sgd, or strategy allreduce or host"
        )


def _layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], len(weight), dtype=torch.float64, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer
