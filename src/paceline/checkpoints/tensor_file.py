"""Safetensors files, written straight from the tensors' memory, one piece after another.

The file is the one that safetensors' own `save_file` makes, and its library reads it. Written here
because the checksum is taken of each piece while it is in the processor's cache, because parts of a
tensor may come from other ranks as they are written, and because errors stay OSErrors. No copy of a
contiguous tensor is made, and no piece is written with the interpreter's lock held.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import InvalidInput

Tensors = dict[str, Tensor]
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8  # of the first tensor in a file
_PIECE_NBYTES = 1 << 20


def within(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    own = (name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in own}


def check_can_be_saved(name: str, value: object) -> None:
    """Raise InvalidInput unless the value is a tensor that a file can hold."""
    if not isinstance(value, Tensor) or value.dtype not in _NAMES:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(name, f"is {kind}, and cannot be saved")
    if value.layout is not torch.strided:
        raise InvalidInput(name, f"is {value.layout}, and cannot be saved", hint="make it dense")


def in_file_order(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return the tensors, larger types first, so that each begins on a whole value in the file."""
    return dict(sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])))


def header(entries: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Return what comes before the tensors' bytes, given their types and shapes in order."""
    listed: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (dtype, shape) in entries.items():
        end = begin + dtype.itemsize * prod(shape)
        listed[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(listed).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor of the host as bytes."""
    flat: np.ndarray = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in the host's memory, one small piece of it after another."""
    memory = bytes_of(tensor.contiguous()).data
    for begin in range(0, len(memory), _PIECE_NBYTES):
        yield memory[begin : begin + _PIECE_NBYTES]


def write(tensors: Mapping[str, Tensor], sink: Callable[[bytes | memoryview], object]) -> None:
    """Give a file of tensors in the host's memory to `sink`, piece by piece.

    Raises InvalidInput for a tensor that a file cannot hold, before anything is written.
    """
    for name, tensor in tensors.items():
        check_can_be_saved(name, tensor)
    ordered = in_file_order(tensors)
    sink(header({name: (one.dtype, one.shape) for name, one in ordered.items()}))
    for tensor in ordered.values():
        for piece in pieces(tensor):
            sink(piece)
