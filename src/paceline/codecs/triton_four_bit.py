"""The 4-bit kernels for CUDA, written in Triton, and their launchers.

The kernels return the same bits as `quantization.py`, and use the tiles of `triton_kernels.py`.
A row of n values has n / 2 bytes of codes.
"""

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs import triton_kernels
from paceline.codecs.quantization import QuantizationTable
from paceline.codecs.triton_kernels import (
    launch_encode,
    load_tile,
    quotient_bits,
    scaled,
    store_tile,
    tile_at,
)

_NUM_THRESHOLDS = tl.constexpr(7)


@triton.jit(do_not_specialize=["count", "num_blocks"])
def encode_tile(
    values,
    codes,
    scales,
    num_nonfinite,
    thresholds,
    count,
    num_blocks,
    block_size,
    num_parts,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    finds_scales: tl.constexpr,
):
    """Write a tile's codes, two per byte; if `finds_scales`, also write its blocks' scales."""
    block, begin, places, inside, left, is_whole = tile_at(
        count, block_size, num_parts, num_rows, num_columns
    )
    bits = load_tile(values + begin, places, inside, left, is_whole).to(tl.int32, bitcast=True)
    blocks = block + tl.arange(0, num_rows)
    magnitudes, scale = scaled(bits, blocks, scales, num_nonfinite, num_blocks, finds_scales)
    quotients = quotient_bits(magnitudes, scale)
    indices = tl.zeros_like(quotients)
    for i in tl.static_range(_NUM_THRESHOLDS):
        indices += (quotients > tl.load(thresholds + i)).to(tl.int32)
    found = tl.where(indices > 0, indices | ((bits >> 28) & 8), 0)
    first, second = tl.split(tl.reshape(found, (num_rows, num_columns // 2, 2)))
    pairs = (first | (second << 4)).to(tl.uint8)
    bytes_, bytes_inside = _bytes_of(block_size, begin, num_rows, num_columns)
    # (left + 1) // 2 is the number of remaining bytes; the last byte may hold only one value.
    store_tile(codes + begin // 2, bytes_, pairs, bytes_inside, (left + 1) // 2, is_whole)


@triton.jit(do_not_specialize=["count", "num_blocks"])
def decode_tile(
    values,
    codes,
    scales,
    meanings,
    count,
    num_blocks,
    block_size,
    num_parts,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    adds: tl.constexpr,
):
    """Decode a tile's codes: overwrite `values`, or add to `values` if `adds`.

    Launch this kernel without fused multiply-add, so that products are rounded before addition.
    """
    block, begin, places, inside, left, is_whole = tile_at(
        count, block_size, num_parts, num_rows, num_columns
    )
    blocks = block + tl.arange(0, num_rows)
    scale = tl.load(scales + blocks, mask=blocks < num_blocks, other=0)
    bytes_, bytes_inside = _bytes_of(block_size, begin, num_rows, num_columns)
    pairs = load_tile(codes + begin // 2, bytes_, bytes_inside, (left + 1) // 2, is_whole)
    given = tl.reshape(tl.join(pairs & 15, pairs >> 4), (num_rows, num_columns))
    found = tl.load(meanings + given) * scale[:, None]
    if adds:
        found = load_tile(values + begin, places, inside, left, is_whole) + found
    store_tile(values + begin, places, found, inside, left, is_whole)


@triton.jit
def _bytes_of(block_size, begin, num_rows: tl.constexpr, num_columns: tl.constexpr):
    """Return the offsets of a tile's bytes, and a mask of the bytes inside their block."""
    rows = tl.arange(0, num_rows)[:, None]
    columns = tl.arange(0, num_columns // 2)[None, :]
    inside = (rows >= 0) & (columns < (block_size - begin % block_size) // 2)
    return rows * (block_size // 2) + columns, inside


def encode(
    values: Tensor, block_size: int, table: QuantizationTable
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode values; return codes, scales and the number of non-finite values, int64 [1].

    A block's scale is its largest finite magnitude.
    """
    thresholds, num_bytes = _thresholds(table, values.device), -(-len(values) // 2)
    return launch_encode(encode_tile, values, None, block_size, num_bytes, thresholds)


decode = partial(triton_kernels.decode, kernel=decode_tile)


@cache
def _thresholds(table: QuantizationTable, device: torch.device) -> Tensor:
    """Return the float32 bits of the thresholds as int32 [7], on a device."""
    return table.thresholds.view(torch.int32).to(device)
