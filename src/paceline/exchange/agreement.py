"""What all ranks must have in common before they can exchange anything."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.links.group import Group
from paceline.models.layers import layers_of

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
Named = tuple[str, str, nn.Parameter]  # layer, name, parameter


def trainable(module: nn.Module, device: torch.device) -> list[Named]:
    """Return (layer, name, parameter) of all parameters to exchange, each once.

    InvalidInput for a parameter of another type or on another device than the rank's.
    """
    named = [
        (layer.name, name, parameter)
        for layer in layers_of(module)
        for name, parameter in layer.parameters
    ]
    if not named:
        raise InvalidInput("module: has no parameter that requires a gradient")
    for _, name, parameter in named:
        if parameter.dtype not in _FLOATS:
            raise InvalidInput(
                f"parameter {name!r}: gradients of {parameter.dtype} cannot be exchanged; "
                "use float32, float64, bfloat16 or float16"
            )
        if parameter.device.type != device.type:
            raise InvalidInput(
                f"parameter {name!r}: lies on {parameter.device}, but this rank computes on "
                f"{device}; move the module there first"
            )
    return named


def check_same(named: Sequence[Named], group: Group) -> None:
    """Raise InvalidInput on all ranks if their parameters differ in name, order, shape or type."""
    rows = [[name, list(p.shape), str(p.dtype)] for _, name, p in named]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    if len(set(group.gather(digest))) == 1:
        return
    ranks = group.gather(rows)
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            raise InvalidInput(f"module: {_difference(ranks[0], other, rank)}")


def _difference(first: list[list[object]], other: list[list[object]], rank: int) -> str:
    for place, (one, two) in enumerate(zip(first, other, strict=False)):
        if one != two:
            return (
                f"trainable parameter {place} is {_described(one)} on rank 0, but "
                f"{_described(two)} on rank {rank}; all ranks must build the same model"
            )
    return (
        f"rank 0 has {len(first)} trainable parameters, but rank {rank} has {len(other)}; "
        "all ranks must build the same model"
    )


def _described(row: list[object]) -> str:
    name, shape, dtype = row
    return f"{name!r} of shape {shape} and type {dtype}"


def agreed_order(own: Sequence[int] | None, num_parameters: int, group: Group) -> list[int] | None:
    """Return rank 0's order of readiness, on every rank; what it never saw ready stands last.

    None says that the backward pass failed on this rank, and is returned if it did on any.
    """
    orders = group.gather(None if own is None else list(own))
    if None in orders:
        return None
    first: list[int] = orders[0]
    seen = set(first)
    return first + [index for index in range(num_parameters) if index not in seen]
