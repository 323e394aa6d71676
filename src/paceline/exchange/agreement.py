"""What all ranks must have in common before they can exchange anything."""

import hashlib
import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

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


def check_same(module: nn.Module, named: Sequence[Named], group: Group) -> None:
    """Raise InvalidInput on all ranks if their models differ.

    Compared are name, order, shape, type and strides, of the parameters in `named` first.
    """
    own = {id(parameter) for _, _, parameter in named}
    rows = [_row("trainable parameter", name, parameter) for _, name, parameter in named]
    rows += [
        _row("frozen parameter", name, parameter)
        for name, parameter in module.named_parameters()
        if id(parameter) not in own
    ]
    rows += [_row("buffer", name, buffer) for name, buffer in module.named_buffers()]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    if len(set(group.gather(digest))) == 1:
        return
    ranks = group.gather(rows)
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            raise InvalidInput(f"module: {_difference(ranks[0], other, rank)}")


def check_same_codec(codec: str | None, group: Group) -> None:
    """Raise InvalidInput on all ranks if their codecs have different names, or some have none."""
    names = group.gather(codec)
    for rank, other in enumerate(names):
        if other != names[0]:
            raise InvalidInput(
                f"codec: rank {rank} has {other or 'none'!r}, but rank 0 {names[0] or 'none'!r}; "
                "give all ranks the same"
            )


def check_frozen(module: nn.Module, frozen: Sequence[nn.Parameter]) -> None:
    """Raise InvalidInput if a parameter that was frozen is not any more."""
    if not any(parameter.requires_grad for parameter in frozen):
        return
    thawed = {id(parameter) for parameter in frozen if parameter.requires_grad}
    name = next(name for name, p in module.named_parameters() if id(p) in thawed)
    raise InvalidInput(
        f"parameter {name!r}: was frozen when the module was made parallel, and is not any more; "
        "make the module parallel again after changing requires_grad"
    )


def _row(kind: str, name: str, tensor: Tensor) -> list[object]:
    return [kind, name, list(tensor.shape), str(tensor.dtype), list(tensor.stride())]


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
