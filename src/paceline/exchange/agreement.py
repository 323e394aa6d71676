"""What all ranks must have in common before they can exchange anything."""

import hashlib
import json
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.links.group import Group
from paceline.models.layers import layers_of

_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Named(NamedTuple):
    """A parameter with its name, and that of the layer that owns it."""

    layer: str
    name: str
    parameter: nn.Parameter


def trainable(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[Named]:
    """Return the parameters with the names that they have in the module, in the order of layers."""
    own = {id(parameter) for parameter in parameters}
    return [
        Named(layer.name, name, parameter)
        for layer in layers_of(module)
        for name, parameter in layer.parameters
        if id(parameter) in own
    ]


def check_exchangeable(parameters: Sequence[Named], device: torch.device) -> None:
    """Raise InvalidInput for a parameter of another type or on another device than the rank's."""
    for _, name, parameter in parameters:
        if parameter.dtype.to_real() not in _TYPES:
            raise InvalidInput(
                f"parameter {name!r}: gradients of {parameter.dtype} cannot be exchanged; "
                "use float32, float64, bfloat16, float16 or complex types"
            )
        if parameter.device.type != device.type:
            raise InvalidInput(
                f"parameter {name!r}: lies on {parameter.device}, but this rank computes on "
                f"{device}; move the module there first"
            )


class ModelsDiffer(InvalidInput, RuntimeError):
    """Ranks have different models: DistributedDataParallel raises RuntimeError for it."""


def check_same(
    module: nn.Module, group: Group, ignored: Container[str] = (), with_buffers: bool = True
) -> None:
    """Raise ModelsDiffer on all ranks if their models differ, but for the names in `ignored`.

    Compared are name, order, shape, type and strides: of trainable parameters first.
    """
    named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
    rows = [_row("trainable parameter", name, p) for name, p in named if p.requires_grad]
    rows += [_row("frozen parameter", name, p) for name, p in named if not p.requires_grad]
    if with_buffers:
        buffers = [(name, b) for name, b in module.named_buffers() if name not in ignored]
        rows += [_row("buffer", name, buffer) for name, buffer in buffers]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    if len(set(group.gather(digest))) == 1:
        return
    ranks = group.gather(rows)
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            raise ModelsDiffer(f"module: {_difference(ranks[0], other, rank)}")


def check_same_codec(codec: str | None, group: Group) -> None:
    """Raise InvalidInput on all ranks if their codecs have different names, or some have none."""
    names = group.gather(codec)
    for rank, other in enumerate(names):
        if other != names[0]:
            raise InvalidInput(
                f"codec: rank {rank} has {other or 'none'!r}, but rank 0 {names[0] or 'none'!r}; "
                "give all ranks the same"
            )


def _row(kind: str, name: str, tensor: Tensor) -> list[object]:
    strides = list(tensor.stride()) if tensor.layout == torch.strided else []
    return [kind, name, list(tensor.shape), str(tensor.dtype), strides]


def _difference(first: list[list[object]], other: list[list[object]], rank: int) -> str:
    for place, (one, two) in enumerate(zip(first, other, strict=False)):
        if one != two:
            return (
                f"number {place} of its tensors is {_described(one)} on rank 0, but "
                f"{_described(two)} on rank {rank}; all ranks must build the same model"
            )
    return (
        f"rank 0 has {len(first)} parameters and buffers, but rank {rank} has {len(other)}; "
        "all ranks must build the same model"
    )


def _described(row: list[object]) -> str:
    kind, name, shape, dtype, strides = row
    return f"the {kind} {name!r} of shape {shape}, type {dtype} and strides {strides}"


def agreed_order(
    own: Sequence[int] | None, num_parameters: int, group: Group, number: int
) -> list[int] | None:
    """Return rank 0's order of readiness, on every rank; what it never saw ready stands last.

    None says that the backward pass failed on this rank, and is returned if it did on any.
    `number` is that of the model among those of this process: InvalidInput, on all ranks, if they
    do not speak of the same one.
    """
    rows = group.gather([number, None if own is None else list(own)])
    if len({other for other, _ in rows}) > 1:
        raise InvalidInput(
            "module: the ranks differentiate several modules in different orders; all must take "
            "them in the same order"
        )
    orders = [order for _, order in rows]
    if None in orders:
        return None
    first: list[int] = orders[0]
    seen = set(first)
    return first + [index for index in range(num_parameters) if index not in seen]
