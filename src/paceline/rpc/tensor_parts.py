"""Tensors as parts of a message, with checks of received parts.

parameters or gradients  -- flatten -->  vector  -- part_of -->  part of a message
received part  -- values_of -->  vector  -- views -->  tensors of the original shapes
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import Message
from paceline.rpc.value_checks import check_buffers

Parts = tuple[memoryview, ...]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the values of all tensors, each in row-major order, into a new vector."""
    if not tensors:  # a head without layers
        return torch.empty(0)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """View a vector as tensors with the shapes of `like`; InvalidInput unless it fits."""
    sizes = [tensor.numel() for tensor in like]
    dtype = like[0].dtype if like else vector.dtype
    if vector.shape != (sum(sizes),) or vector.dtype != dtype:
        problem = f"must be {sum(sizes):,} values of {dtype}: hub and worker need the same model"
        raise InvalidInput("parameters", problem, got=f"{list(vector.shape)} of {vector.dtype}")
    return [part.view(one.shape) for part, one in zip(vector.split(sizes), like, strict=True)]


@torch.no_grad()
def load_vector(parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Copy the values of a vector into the parameters; raise InvalidInput unless they fit."""
    for parameter, values in zip(parameters, views(vector, parameters), strict=True):
        parameter.copy_(values)


def buffers_of(half: nn.Module) -> memoryview:
    """Concatenate the bytes of all buffers of a body or a head."""
    return memoryview(b"".join(part_of(buffer.detach().cpu()) for buffer in half.buffers()))


@torch.no_grad()
def load_buffers(half: nn.Module, part: memoryview) -> None:
    """Copy the bytes from `buffers_of` into buffers, after `check_buffers`."""
    buffers = list(half.buffers())
    sizes = [buffer.nbytes for buffer in buffers]
    values = values_of(part, torch.uint8, sum(sizes))
    # Clone, because viewing as another type requires alignment.
    found = [
        own.clone().view(buffer.dtype).view(buffer.shape)
        for buffer, own in zip(buffers, values.split(sizes), strict=True)
    ]
    check_buffers(found, buffers)
    for buffer, own in zip(buffers, found, strict=True):
        buffer.copy_(own)


def parts_of(message: Message) -> Parts:
    """Return the parts of a received message."""
    return tuple(memoryview(part) for part in message.parts)


def part_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def values_of(part: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    """View a part as `count` values; raise InvalidInput if its size differs."""
    if part.nbytes != count * dtype.itemsize:
        problem = f"must be {count:,} values of {dtype}, {count * dtype.itemsize:,} bytes"
        raise InvalidInput("parameters", problem, got=part.nbytes)
    if not count:
        return torch.empty(0, dtype=dtype)
    whole = bytearray(part) if part.readonly else part  # torch warns about read-only memory
    return torch.frombuffer(whole, dtype=dtype)


def numbers_part(numbers: Iterable[int]) -> memoryview:
    """Encode integers as a part of a message."""
    return part_of(torch.tensor(list(numbers), dtype=torch.int64))


def numbers_of(part: memoryview) -> tuple[int, ...]:
    """Decode the integers of a part; InvalidInput if its size is no multiple of 8 bytes."""
    return tuple(values_of(part, torch.int64, part.nbytes // torch.int64.itemsize).tolist())
