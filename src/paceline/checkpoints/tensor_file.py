"""Write safetensors files piece by piece, straight from the tensors' memory.

The file is identical to a file that safetensors' `save_file` writes. Unlike with `save_file`, the
caller can compute a piece's checksum while the piece is in the CPU's cache, and can receive tensors
of other ranks while earlier tensors are written. Failures raise OSError.
"""

import json
from collections.abc import Iterator, Mapping

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
_ALIGNMENT = 8  # the header is padded so that the tensors begin at a multiple of 8 bytes
_PIECE_NBYTES = 1 << 20


def within(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Select the tensors whose names begin with a prefix, and remove this prefix."""
    return {
        name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)
    }


def check_can_be_saved(name: str, value: object) -> None:
    """Raise InvalidInput unless the value is a dense tensor with a supported dtype."""
    if not isinstance(value, Tensor) or value.dtype not in _NAMES:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(name, f"has type {kind}, which a checkpoint cannot hold")
    if value.layout is not torch.strided:
        problem = f"has layout {value.layout}, which a checkpoint cannot hold"
        raise InvalidInput(name, problem, hint="use a dense tensor")


def in_file_order(tensors: Mapping[str, Tensor]) -> Tensors:
    """Sort tensors by element size, largest first, so that each tensor is aligned in the file."""
    return dict(sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0])))


def header(ordered: Mapping[str, Tensor]) -> bytes:
    """Return a file's header; `ordered`: its tensors in file order (meta tensors suffice)."""
    listed: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in ordered.items():
        end = begin + tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [begin, end]}
        listed[name] = {"dtype": _NAMES[tensor.dtype]} | place
        begin = end
    text = json.dumps(listed).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: Tensor) -> np.ndarray:
    """View the memory of a contiguous host tensor as bytes."""
    flat: np.ndarray = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat


def pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a host tensor in pieces of 1 MiB."""
    memory = bytes_of(tensor.contiguous()).data
    for begin in range(0, len(memory), _PIECE_NBYTES):
        yield memory[begin : begin + _PIECE_NBYTES]


def encoded(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces; raise InvalidInput for an unsupported tensor."""
    for name, tensor in tensors.items():
        check_can_be_saved(name, tensor)
    ordered = in_file_order(tensors)
    yield header(ordered)
    for tensor in ordered.values():
        yield from pieces(tensor)
