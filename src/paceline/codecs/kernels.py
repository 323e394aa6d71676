"""Eight-bit codes by the kernels for a tensor's device: C++, Triton or, without either, torch.

All give the same bits, those of blockwise.py.
"""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.codecs import blockwise
from paceline.codecs.table import Table, table
from paceline.native import Codebook, decode_into, encode_into


def encode(
    values: Tensor, scales: Tensor | None, block_size: int, name: str
) -> tuple[Tensor, Tensor, int]:
    """Return codes, scales, and how many values are not finite.

    Without `scales` each block's is its largest finite magnitude. `name` is one of `TABLES`.
    """
    block_size = _shortened(block_size, values)
    prepared = _prepared(name)
    if values.is_cpu:
        return _encode_natively(values, scales, block_size, prepared.book)
    if has_triton(values):
        from paceline.codecs import triton_launch

        codes, scales, num_nonfinite = triton_launch.encode(
            values, scales, block_size, prepared.table
        )
        return codes, scales, int(num_nonfinite)
    if scales is None:
        scales = blockwise.scales_of(values, block_size)
    codes = blockwise.encode(values, scales, block_size, prepared.table)
    return codes, scales, blockwise.num_nonfinite(values)


def encode_stochastic(
    values: Tensor, scales: Tensor | None, block_size: int, name: str
) -> tuple[Tensor, Tensor, int]:
    """Return the same, rounded at random by torch's global generator. There are no kernels."""
    block_size = _shortened(block_size, values)
    if scales is None:
        scales = blockwise.scales_of(values, block_size)
    codes = blockwise.encode_stochastic(values, scales, block_size, _prepared(name).table)
    return codes, scales, blockwise.num_nonfinite(values)


def decode(
    values: Tensor, codes: Tensor, scales: Tensor, block_size: int, name: str, adds: bool
) -> None:
    """Write what the codes mean to `values`, or add it to them."""
    block_size = _shortened(block_size, values)
    prepared = _prepared(name)
    fits = values.is_contiguous() and codes.is_contiguous()  # as kernels need it
    if fits and values.is_cpu:
        num_threads = torch.get_num_threads()
        decode_into(values, codes, scales, block_size, prepared.book, adds, num_threads)
    elif fits and has_triton(values):
        from paceline.codecs import triton_launch

        triton_launch.decode(values, codes, scales, block_size, prepared.table, adds)
    else:
        decoded = blockwise.decode(codes, scales, block_size, prepared.table)
        values.copy_(values + decoded if adds else decoded)


def _encode_natively(
    values: Tensor, scales: Tensor | None, block_size: int, book: Codebook
) -> tuple[Tensor, Tensor, int]:
    codes = torch.empty(len(values), dtype=torch.uint8)
    found = torch.empty(-(-len(values) // block_size)) if scales is None else scales
    num_nonfinite = encode_into(
        codes, found, values, block_size, book, scales is None, torch.get_num_threads()
    )
    return codes, found, num_nonfinite


def _shortened(block_size: int, values: Tensor) -> int:
    """Return the length of the longest block there is, so that none is filled up beyond that."""
    return min(block_size, max(1, len(values)))


def has_triton(values: Tensor) -> bool:
    """Return whether the kernels for CUDA can be used for the values."""
    return values.is_cuda and _triton_compiles()


@cache
def _triton_compiles() -> bool:
    """Whether there is Triton, and a C compiler, by which it makes what starts its kernels."""
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    return find_spec("triton") is not None and any(compilers)


@dataclass(frozen=True, eq=False)
class _Prepared:
    table: Table
    book: Codebook


@cache
def _prepared(name: str) -> _Prepared:
    """Return a table, and what the C++ kernels make of it."""
    one = table(name)
    return _Prepared(one, Codebook(one.magnitudes.tolist(), one.thresholds.tolist()))
