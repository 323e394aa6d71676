"""A half's parameters, or their gradients, as one vector: what travels of the body."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector of all values, one tensor after the other, each in row-major order."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector that `flatten` made of tensors like these, without copies.

    InvalidInput if it has another number of values, or another type.
    """
    count = sum(tensor.numel() for tensor in like)
    dtype = like[0].dtype
    if flat.shape != (count,) or flat.dtype != dtype:
        raise InvalidInput(
            f"{_said(flat)} came where {count} values of {_name(dtype)} belong: "
            "the other side has another model"
        )
    parts = flat.split([tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@torch.no_grad()
def load(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Give the parameters the values of a vector; InvalidInput if it does not fit."""
    for parameter, values in zip(parameters, views(flat, parameters), strict=True):
        parameter.copy_(values)


def take_gradients(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return the gradients, and leave the parameters none.

    InvalidInput names a parameter whose gradient is sparse or has not come.
    """
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return [_checked(*named) for named in zip(names, gradients, strict=True)]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no value is NaN or infinite; each is read once if that is so."""
    for tensor in tensors:
        # A sum with NaN or infinity in it is never finite; a sum of finite values may overflow.
        if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
            return False
    return True


def _checked(name: str, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise InvalidInput(
            f"parameter {name!r} got no gradient in a step; freeze it (requires_grad = False), or "
            "train with a data-parallel strategy"
        )
    if gradient.layout != torch.strided:
        raise InvalidInput(
            f"parameter {name!r} has sparse gradients, which wheel does not train with; "
            "build its layer with sparse=False"
        )
    return gradient


def _said(flat: Tensor) -> str:
    shape = "x".join(map(str, flat.shape)) or "1"
    return f"a tensor of {shape} values of {_name(flat.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
