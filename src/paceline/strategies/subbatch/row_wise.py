"""Check that an optimizer updates each row of a weight independently of the others."""

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput, first_line
from paceline.exchange.step import Optimize

_NUM_STEPS = 3
_ALL, _HALVES = slice(0, 4), (slice(0, 2), slice(2, 4))  # outputs of a layer of four


def check_row_wise(optimizer: Optimize) -> None:
    """Raise InvalidInput if an optimizer updates halves of a small layer other than the whole."""
    try:
        made, apart = _moves(optimizer, has_bias=True)
    except Exception:  # some optimizers take matrices only
        try:
            made, apart = _moves(optimizer, has_bias=False)
        except Exception as error:
            raise InvalidInput(
                "optimizer", f"cannot update a linear layer: {first_line(error)}"
            ) from error
    if apart:
        raise InvalidInput(
            "optimizer",
            "must update each row of a weight independently, because subbatch splits the head",
            got=made,
            hint="use adamw or sgd, or strategy allreduce or host",
        )


def _moves(optimizer: Optimize, has_bias: bool) -> tuple[str, bool]:
    """Return the optimizer's name, and whether it updates halves of a layer differently."""
    source = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        shapes = [(4, 3), (4,)] if has_bias else [(4, 3)]
        return [torch.randn(one, generator=source, dtype=torch.float64) for one in shapes]

    before, parts = drawn(), (_ALL, *_HALVES)
    layers = [_layer([value[part] for value in before]) for part in parts]
    optimizers = [optimizer(layer) for layer in layers]
    for _ in range(_NUM_STEPS):
        gradients = drawn()
        for layer, part in zip(layers, parts, strict=True):
            for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
                parameter.grad = gradient[part].clone()
        for one in optimizers:
            one.step()
    whole, *halves = ([one.detach() for one in layer.parameters()] for layer in layers)
    moved = [
        (value - start, torch.cat(rows) - start)
        for start, value, *rows in zip(before, whole, *halves, strict=True)
    ]
    apart = any(not torch.allclose(*pair, rtol=1e-6, atol=1e-14) for pair in moved)
    return type(optimizers[0]).__name__, apart


def _layer(values: list[Tensor]) -> nn.Linear:
    """Return a layer with these weights and, if present, biases."""
    num_outputs, num_inputs = values[0].shape
    layer = nn.Linear(num_inputs, num_outputs, bias=len(values) > 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), values, strict=True):
            parameter.copy_(value)
    return layer
