"""Tensors as the parts of a message, and their checks when they have come.

parameters or gradients  -- flatten -->  vector  -- part_of -->  part of a message
part that came  -- values_of -->  vector  -- views -->  tensors like before
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import Message
from paceline.rpc.proportion import check_buffers

Parts = tuple[memoryview, ...]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new vector of all values, one tensor after the other, each in row-major order."""
    if not tensors:  # of a head without layers
        return torch.empty(0)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector, one `like` each tensor; InvalidInput if size or type differ."""
    sizes = [tensor.numel() for tensor in like]
    dtype = like[0].dtype if like else vector.dtype
    if vector.shape != (sum(sizes),) or vector.dtype != dtype:
        shape = "x".join(map(str, vector.shape)) or "1"
        came, belongs = (str(one).removeprefix("torch.") for one in (vector.dtype, dtype))
        raise InvalidInput(
            "parameters",
            f"a tensor of {shape} values of {came} came where {sum(sizes)} values of {belongs} "
            "belong: the other side has another model",
        )
    return [part.view(one.shape) for part, one in zip(vector.split(sizes), like, strict=True)]


@torch.no_grad()
def load_vector(parameters: Sequence[nn.Parameter], vector: Tensor) -> None:
    """Copy the values of a vector into the parameters; InvalidInput if it does not fit."""
    for parameter, values in zip(parameters, views(vector, parameters), strict=True):
        parameter.copy_(values)


def buffers_of(half: nn.Module) -> memoryview:
    """Return the values of all buffers of a half, one after the other."""
    return memoryview(b"".join(part_of(buffer.detach().cpu()) for buffer in half.buffers()))


@torch.no_grad()
def load_buffers(half: nn.Module, part: memoryview) -> None:
    """Copy values that `buffers_of` returned into a half's buffers; InvalidInput if not as many."""
    buffers = list(half.buffers())
    sizes = [buffer.nbytes for buffer in buffers]
    values = values_of(part, torch.uint8, sum(sizes))
    # Copies, because a view as another type has to be aligned.
    found = [
        own.clone().view(buffer.dtype).view(buffer.shape)
        for buffer, own in zip(buffers, values.split(sizes), strict=True)
    ]
    check_buffers(found, buffers)
    for buffer, own in zip(buffers, found, strict=True):
        buffer.copy_(own)


def parts_of(message: Message) -> Parts:
    """Return the parts of a message that came."""
    return tuple(memoryview(part) for part in message.parts)


def part_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def values_of(part: memoryview, dtype: torch.dtype, count: int) -> Tensor:
    """Return the values in a part, in its memory; InvalidInput if there are not `count` of them."""
    if part.nbytes != count * dtype.itemsize:
        raise InvalidInput(
            "parameters",
            f"{part.nbytes:,} bytes",
            hint=f"{count:,} values of {dtype} are {count * dtype.itemsize:,}",
        )
    if not count:
        return torch.empty(0, dtype=dtype)
    whole = bytearray(part) if part.readonly else part  # torch warns of memory it cannot write
    return torch.frombuffer(whole, dtype=dtype)


def numbers_part(numbers: Iterable[int]) -> memoryview:
    """Encode integers as a part of a message."""
    return part_of(torch.tensor(list(numbers), dtype=torch.int64))


def numbers_of(part: memoryview) -> tuple[int, ...]:
    """Return the integers in a part; InvalidInput if it does not hold whole ones."""
    return tuple(values_of(part, torch.int64, part.nbytes // torch.int64.itemsize).tolist())
