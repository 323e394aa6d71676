"""What lies in an arena's memory: values of a type that can be summed, as bytes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.native import DType

_DTYPES = {
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
}


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` values of one type that begin at byte `offset` of every slot."""

    offset: int
    count: int
    dtype: torch.dtype


def dtype_of(dtype: torch.dtype) -> DType:
    """Return the native type; ValueError if values of it cannot be summed."""
    if dtype not in _DTYPES:
        raise ValueError(f"values of type {dtype} cannot be summed")
    return _DTYPES[dtype]


def bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return address and size; ValueError unless it is a dense tensor in host memory."""
    is_dense = tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if not tensor.is_cpu or not is_dense:
        raise ValueError("only a dense tensor in host memory can be copied")
    return tensor.data_ptr(), tensor.nbytes
