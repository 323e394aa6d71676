"""The kernels for CUDA, in Triton's language; blockwise.py specifies every bit of what they do.

A program works on a tile: `num_rows` blocks of at most `num_columns` values each or, of blocks that
are longer than that, one of `num_parts` parts.
"""

import triton
import triton.language as tl

_INFINITY = tl.constexpr(0x7F800000)  # as bits: those of finite magnitudes are smaller
_NOTHING = tl.constexpr(2.0**-30)  # below the first threshold of every table


@triton.jit(do_not_specialize=["count", "num_blocks", "first_cell", "last_cell"])
def encode_tile(
    values,
    codes,
    scales,
    num_nonfinite,
    cells,
    count,
    num_blocks,
    block_size,
    num_parts,
    first_cell,
    last_cell,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    finds_scales: tl.constexpr,
):
    """Write the codes of a tile and, if told to find them, the scales of its blocks."""
    block, begin, places, inside, left, is_whole = _tile(
        count, block_size, num_parts, num_rows, num_columns
    )
    bits = _load(values + begin, places, inside, left, is_whole).to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    largest = tl.max(magnitudes, 1)
    if tl.max(largest, 0) >= _INFINITY:
        finite = magnitudes < _INFINITY
        num_bad = tl.sum(tl.sum((~finite).to(tl.int32), 1), 0)
        tl.atomic_add(num_nonfinite, num_bad.to(tl.int64), sem="relaxed")
        magnitudes = tl.where(finite, magnitudes, 0)
        largest = tl.max(magnitudes, 1)
    blocks = block + tl.arange(0, num_rows)
    if finds_scales:
        scale = largest.to(tl.float32, bitcast=True)
        tl.store(scales + blocks, scale, mask=blocks < num_blocks)
    else:
        given = tl.load(scales + blocks, mask=blocks < num_blocks, other=0)
        scale = tl.where(given < float("inf"), given, 0.0)
        magnitudes = tl.where(scale[:, None] > 0, magnitudes, 0)
    indices = _indices(magnitudes.to(tl.float32, bitcast=True), scale, cells, first_cell, last_cell)
    signed = indices | ((bits >> 24) & 0x80)
    found = tl.where(indices > 0, signed, 0).to(tl.uint8)
    _store(codes + begin, places, found, inside, left, is_whole)


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
    """Write, or add, the values of a tile's codes.

    To be launched without fused multiply-add: products are rounded before they are added.
    """
    block, begin, places, inside, left, is_whole = _tile(
        count, block_size, num_parts, num_rows, num_columns
    )
    blocks = block + tl.arange(0, num_rows)
    scale = tl.load(scales + blocks, mask=blocks < num_blocks, other=0)
    given = _load(codes + begin, places, inside, left, is_whole)
    found = tl.load(meanings + given) * scale[:, None]
    if adds:
        found = _load(values + begin, places, inside, left, is_whole) + found
    _store(values + begin, places, found, inside, left, is_whole)


@triton.jit
def _indices(magnitudes, scale, cells, first_cell, last_cell):
    """Return the index of the magnitude of the table that is nearest to each quotient.

    The upper half of a quotient's bits chooses its cell. In it stands how many thresholds are below
    (upper half), and what carries over with the lower half if the one within is below too.
    """
    # Zeros, and divisors that are no normal numbers, would take the long way of a division.
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    quotients = tl.div_rn(tl.maximum(magnitudes, divisor * _NOTHING), divisor)
    bits = quotients.to(tl.int32, bitcast=True)
    cell = tl.minimum(tl.maximum(bits >> 16, first_cell), last_cell) - first_cell
    return (tl.load(cells + cell) + (bits & 0xFFFF)) >> 16


@triton.jit
def _tile(count, block_size, num_parts, num_rows: tl.constexpr, num_columns: tl.constexpr):
    """Return where this program's tile is.

    Its first block; the place of its first value in all; the places of its values from there; which
    of them are within their block; how many values there are from there; whether there are as many
    as the tile reaches.
    """
    block = (tl.program_id(0) // num_parts).to(tl.int64) * num_rows
    first = tl.program_id(0) % num_parts * num_columns
    begin = block * block_size + first
    rows = tl.arange(0, num_rows)[:, None]
    columns = tl.arange(0, num_columns)[None, :]
    inside = (rows >= 0) & (columns < block_size - first)
    left = tl.minimum(count - begin, 2**30).to(tl.int32)  # places are 32-bit integers
    reach = (num_rows - 1) * block_size + num_columns
    return block, begin, rows * block_size + columns, inside, left, reach <= left


# Only the last tile compares its places with `left`: a mask that depends on any number there may be
# would keep neighbours from being loaded and stored together, in one wide access.
@triton.jit
def _load(pointer, places, inside, left, is_whole):
    if is_whole:
        found = tl.load(pointer + places, mask=inside, other=0)
    else:
        found = tl.load(pointer + places, mask=inside & (places < left), other=0)
    return found


@triton.jit
def _store(pointer, places, found, inside, left, is_whole):
    if is_whole:
        tl.store(pointer + places, found, mask=inside)
    else:
        tl.store(pointer + places, found, mask=inside & (places < left))
