"""Encode and decode blocks of values: in C++ on CPU, in Triton or torch on other devices.

`quantization` is the reference in torch; all kernels return the same bits. Two 4-bit codes share a
byte.
"""

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.codecs import quantization
from paceline.codecs.codec import num_nonfinite
from paceline.codecs.quantization import EncodedBlocks, QuantizationTable, join, scales_of, split
from paceline.links.devices import device_of


def encode(
    values: Tensor, scales: Tensor | None, block_size: int, table: QuantizationTable
) -> tuple[Tensor, Tensor, int]:
    """Return the codes, the scale of each block, and the number of non-finite values.

    `scales`: a fixed scale for each block (8-bit types only). If None, each block's scale is its
    largest finite magnitude.
    """
    if values.is_cpu:
        finds_scales, num_threads = scales is None, torch.get_num_threads()
        if scales is None:
            scales = torch.empty(-(-len(values) // block_size))
        codes = torch.empty(-(-len(values) * table.num_bits // 8), dtype=torch.uint8)
        num_lost = table.lookup.encode_into(
            codes, scales, values, block_size, finds_scales, num_threads
        )
        return codes, scales, num_lost
    if has_triton(values):
        from paceline.codecs import triton_kernels

        codes, scales, num_found = triton_kernels.encode(values, scales, block_size, table)
        return codes, scales, int(num_found)
    if scales is None:
        scales = scales_of(values, block_size)
    codes = quantization.encode(values, scales, block_size, table)
    return join(codes) if table.num_bits == 4 else codes, scales, num_nonfinite(values)


def decode(values: Tensor, encoded: EncodedBlocks, adds: bool) -> None:
    """Decode into `values`; if `adds` is true, add to `values`, else overwrite them."""
    codes, scales, block_size, table = encoded
    # The C++ and Triton kernels need contiguous memory; a slice of a tensor may have other strides.
    fits = values.is_contiguous() and codes.is_contiguous()
    if fits and values.is_cpu:
        num_threads = torch.get_num_threads()
        table.lookup.decode_into(values, codes, scales, block_size, adds, num_threads)
    elif fits and has_triton(values):
        from paceline.codecs import triton_kernels

        triton_kernels.decode(values, encoded, adds)
    else:
        apart = split(codes, len(values)) if table.num_bits == 4 else codes
        found = quantization.decode(encoded._replace(codes=apart))
        values.copy_(values + found if adds else found)


def has_triton(values: Tensor) -> bool:
    """Return whether the Triton kernels can run on the values' device."""
    return device_of(values.device).has_triton and _triton_compiles()


@cache
def _triton_compiles() -> bool:
    """Return whether Triton is installed, and a C compiler, which Triton needs."""
    compilers = (os.environ.get("CC"), shutil.which("gcc"), shutil.which("clang"))
    return find_spec("triton") is not None and any(compilers)
