"""The 8-bit and 4-bit kernels for CUDA, written in Triton, and their launchers.

The kernels return the same bits as `quantization.py`. Each Triton program encodes or decodes one
tile: `num_rows` blocks of at most `num_columns` values each. A block of more than `num_columns`
values is divided into `num_parts` tiles of one row. With 4-bit types, n values have n / 2 bytes of
codes.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.codecs.quantization import EncodedBlocks, QuantizationTable, scales_of
from paceline.links.devices import device_of

_INFINITY = tl.constexpr(0x7F800000)  # bits of infinity, larger than the bits of finite magnitudes
_NOTHING = tl.constexpr(2.0**-30)  # a small quotient, which every table encodes as zero
_NUM_THRESHOLDS = tl.constexpr(7)  # thresholds between the 8 magnitudes of a 4-bit type
# A tile has `COLUMNS` values. But to compute the scale of a longer block, a tile contains the whole
# block, at most `MOST_COLUMNS` values. The scales of even longer blocks are computed in torch.
COLUMNS = 1024
MOST_COLUMNS = 8192
# Each of a warp's 32 threads encodes 8 values, or decodes 4 values (one access of 16 bytes).
_VALUES_PER_WARP = {"encode": 256, "decode": 128}


@triton.jit(do_not_specialize=["count", "num_blocks", "first_cell", "last_cell"])
def encode_tile(
    values,
    codes,
    scales,
    num_nonfinite,
    lookup,
    count,
    num_blocks,
    block_size,
    num_parts,
    first_cell,
    last_cell,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    finds_scales: tl.constexpr,
    is_four_bit: tl.constexpr,
):
    """Write a tile's codes; if `finds_scales`, also compute and write its blocks' scales.

    `lookup`, `first_cell`, `last_cell`: the fields of the `_Lookup` that `_lookup` returns.
    """
    block, begin, places, inside, left, is_whole = _tile_at(
        count, block_size, num_parts, num_rows, num_columns
    )
    bits = _load_tile(values + begin, places, inside, left, is_whole).to(tl.int32, bitcast=True)
    blocks = block + tl.arange(0, num_rows)
    magnitudes, scale = _scaled(bits, blocks, scales, num_nonfinite, num_blocks, finds_scales)
    quotients = _quotient_bits(magnitudes, scale)
    if is_four_bit:
        indices = tl.zeros_like(quotients)
        for i in tl.static_range(_NUM_THRESHOLDS):
            indices += (quotients > tl.load(lookup + i)).to(tl.int32)
        found = tl.where(indices > 0, indices | ((bits >> 28) & 8), 0)
        first, second = tl.split(tl.reshape(found, (num_rows, num_columns // 2, 2)))
        pairs = (first | (second << 4)).to(tl.uint8)
        bytes_, bytes_inside = _bytes_of(block_size, begin, num_rows, num_columns)
        # The `left` remaining values have (left + 1) // 2 bytes; the last byte may have one value.
        _store_tile(codes + begin // 2, bytes_, pairs, bytes_inside, (left + 1) // 2, is_whole)
    else:
        cell = tl.minimum(tl.maximum(quotients >> 16, first_cell), last_cell) - first_cell
        indices = (tl.load(lookup + cell) + (quotients & 0xFFFF)) >> 16
        found = tl.where(indices > 0, indices | ((bits >> 24) & 0x80), 0).to(tl.uint8)
        _store_tile(codes + begin, places, found, inside, left, is_whole)


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
    is_four_bit: tl.constexpr,
):
    """Decode a tile's codes into `values`; if `adds` is true, add to `values`.

    Launch this kernel without fused multiply-add, so that products are rounded before addition.
    """
    block, begin, places, inside, left, is_whole = _tile_at(
        count, block_size, num_parts, num_rows, num_columns
    )
    blocks = block + tl.arange(0, num_rows)
    scale = tl.load(scales + blocks, mask=blocks < num_blocks, other=0)
    if is_four_bit:
        bytes_, bytes_inside = _bytes_of(block_size, begin, num_rows, num_columns)
        pairs = _load_tile(codes + begin // 2, bytes_, bytes_inside, (left + 1) // 2, is_whole)
        given = tl.reshape(tl.join(pairs & 15, pairs >> 4), (num_rows, num_columns))
    else:
        given = _load_tile(codes + begin, places, inside, left, is_whole)
    found = tl.load(meanings + given) * scale[:, None]
    if adds:
        found = _load_tile(values + begin, places, inside, left, is_whole) + found
    _store_tile(values + begin, places, found, inside, left, is_whole)


@triton.jit
def _scaled(bits, blocks, scales, num_nonfinite, num_blocks, finds_scales: tl.constexpr):
    """Return the magnitudes of a tile, float32, and the scale of each row.

    Non-finite values become zero, and are counted in `num_nonfinite`. If `finds_scales` is true,
    computes the scales and stores them in `scales`; if false, loads them from `scales`.
    """
    magnitudes = bits & 0x7FFFFFFF
    largest = tl.max(magnitudes, 1)
    if tl.max(largest, 0) >= _INFINITY:
        finite = magnitudes < _INFINITY
        num_bad = tl.sum(tl.sum((~finite).to(tl.int32), 1), 0)
        tl.atomic_add(num_nonfinite, num_bad.to(tl.int64), sem="relaxed")
        magnitudes = tl.where(finite, magnitudes, 0)
        largest = tl.max(magnitudes, 1)
    if finds_scales:
        scale = largest.to(tl.float32, bitcast=True)
        tl.store(scales + blocks, scale, mask=blocks < num_blocks)
    else:
        given = tl.load(scales + blocks, mask=blocks < num_blocks, other=0)
        scale = tl.where(given < float("inf"), given, 0.0)
        magnitudes = tl.where(scale[:, None] > 0, magnitudes, 0)
    return magnitudes.to(tl.float32, bitcast=True), scale


@triton.jit
def _quotient_bits(magnitudes, scale):
    """Return the bits of magnitude / scale as int32; a larger quotient has a larger int32."""
    # Avoid zeros and denormal numbers, for which division is slow.
    divisor = tl.where(scale > 0, scale, 1.0)[:, None]
    quotients = tl.div_rn(tl.maximum(magnitudes, divisor * _NOTHING), divisor)
    return quotients.to(tl.int32, bitcast=True)


@triton.jit
def _tile_at(count, block_size, num_parts, num_rows: tl.constexpr, num_columns: tl.constexpr):
    """Return the position of this program's tile.

    The results are, in this order:

    - the index of the tile's first block;
    - the index of the tile's first value;
    - the offsets of the tile's values from the first value;
    - a mask of the values that are inside their block;
    - the number of values from the first value to the end of the tensor, at most 2^30;
    - whether the tile is completely inside the tensor.
    """
    block = (tl.program_id(0) // num_parts).to(tl.int64) * num_rows
    first = tl.program_id(0) % num_parts * num_columns
    begin = block * block_size + first
    rows = tl.arange(0, num_rows)[:, None]
    columns = tl.arange(0, num_columns)[None, :]
    inside = (rows >= 0) & (columns < block_size - first)
    left = tl.minimum(count - begin, 2**30).to(tl.int32)  # must fit in 32 bits, as offsets do
    reach = (num_rows - 1) * block_size + num_columns
    return block, begin, rows * block_size + columns, inside, left, reach <= left


@triton.jit
def _bytes_of(block_size, begin, num_rows: tl.constexpr, num_columns: tl.constexpr):
    """Return the byte offsets of a tile's 4-bit codes, and a mask that excludes padding."""
    rows = tl.arange(0, num_rows)[:, None]
    columns = tl.arange(0, num_columns // 2)[None, :]
    inside = (rows >= 0) & (columns < (block_size - begin % block_size) // 2)
    return rows * (block_size // 2) + columns, inside


# The mask `places < left` (positions inside the tensor) prevents wide loads and stores. So these
# functions use it only for a tile that is partly outside of the tensor.
@triton.jit
def _load_tile(pointer, places, inside, left, is_whole):
    """Load a tile's values; return zero for positions outside of its blocks."""
    if is_whole:
        found = tl.load(pointer + places, mask=inside, other=0)
    else:
        found = tl.load(pointer + places, mask=inside & (places < left), other=0)
    return found


@triton.jit
def _store_tile(pointer, places, found, inside, left, is_whole):
    """Store the values `found` of a tile, except at positions outside of its blocks."""
    if is_whole:
        tl.store(pointer + places, found, mask=inside)
    else:
        tl.store(pointer + places, found, mask=inside & (places < left))


def encode(
    values: Tensor, scales: Tensor | None, block_size: int, table: QuantizationTable
) -> tuple[Tensor, Tensor, Tensor]:
    """Encode values; return codes, scales and the number of non-finite values, int64 [1].

    If `scales` is None, the scale of each block is its largest finite magnitude.
    """
    finds_scales = scales is None and block_size <= MOST_COLUMNS
    tiles = Tiles.of(len(values), block_size, MOST_COLUMNS if finds_scales else COLUMNS)
    if finds_scales:
        scales = torch.empty(tiles.num_blocks, device=values.device)
    elif scales is None:
        scales = scales_of(values, block_size)
    num_bytes, lookup = -(-len(values) * table.num_bits // 8), _lookup(table, values.device)
    codes = torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
    num_nonfinite = torch.zeros(1, dtype=torch.int64, device=values.device)
    # Triton launches on the current device, which may differ from the device of `values`.
    with device_of(values.device).use():
        encode_tile[(tiles.num_programs,)](
            *(values, codes, scales, num_nonfinite, lookup.table),
            *(len(values), tiles.num_blocks, block_size, tiles.num_parts),
            *(lookup.first_cell, lookup.last_cell),
            *(tiles.num_rows, tiles.num_columns, finds_scales, table.num_bits == 4),
            num_warps=tiles.num_warps("encode"),
            # A fused multiply-add rounds once instead of twice, which would change the result.
            enable_fp_fusion=False,
        )
    return codes, scales, num_nonfinite


def decode(values: Tensor, encoded: EncodedBlocks, adds: bool) -> None:
    """Decode into `values`; if `adds` is true, add to `values`, else overwrite them."""
    codes, scales, block_size, table = encoded
    tiles = Tiles.of(len(values), block_size, COLUMNS)
    meanings = _meanings(table, values.device)
    with device_of(values.device).use():
        decode_tile[(tiles.num_programs,)](
            *(values, codes, scales, meanings),
            *(len(values), tiles.num_blocks, block_size, tiles.num_parts),
            *(tiles.num_rows, tiles.num_columns, adds, table.num_bits == 4),
            num_warps=tiles.num_warps("decode"),
            enable_fp_fusion=False,
        )


class Tiles(NamedTuple):
    """The division of a tensor's blocks into tiles.

    `num_blocks`: number of blocks. `num_parts`: number of tiles of one block; 1 if a block fits
    into a row of a tile. `num_rows`, `num_columns`: size of a tile, powers of 2.
    """

    num_blocks: int
    num_parts: int
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, count: int, block_size: int, most_columns: int) -> "Tiles":
        """Divide `count` values into tiles of at most `most_columns` columns."""
        num_columns = min(1 << (block_size - 1).bit_length(), most_columns)
        num_rows = max(1, COLUMNS // num_columns)
        return cls(-(-count // block_size), -(-block_size // num_columns), num_rows, num_columns)

    @property
    def num_programs(self) -> int:
        """The number of Triton programs, one for each tile."""
        return -(-self.num_blocks // self.num_rows) * self.num_parts

    def num_warps(self, of: str) -> int:
        """Return a program's number of warps; `of`: its work, "encode" or "decode"."""
        return self.num_rows * self.num_columns // _VALUES_PER_WARP[of]


class _Lookup(NamedTuple):
    """A lookup table for `encode_tile`, int32.

    For a 4-bit type, its entries are the 7 thresholds, as bits of float32 values. For an 8-bit
    type, they are the entries that `cells_of` describes.
    """

    table: Tensor
    first_cell: int = 0
    last_cell: int = 0


@cache
def _lookup(table: QuantizationTable, device: torch.device) -> _Lookup:
    """Return the lookup table of `encode_tile` on a device."""
    if table.num_bits == 4:
        return _Lookup(table.thresholds.view(torch.int32).to(device))
    first_cell, cells = cells_of(table)
    return _Lookup(cells.to(device), first_cell, first_cell + len(cells) - 1)


@cache
def _meanings(table: QuantizationTable, device: torch.device) -> Tensor:
    """Return a tensor on `device` with the value of each code, float32."""
    return table.values.to(device)


def cells_of(table: QuantizationTable) -> tuple[int, Tensor]:
    """Return the lookup table of an 8-bit type: the first cell's number, and the entries, int32.

    A cell is a range of quotients (float32) with equal upper 16 bits, which are the cell's number.
    It contains at most one threshold. The upper 16 bits of a cell's entry are the number of
    thresholds in earlier cells. The entry's lower 16 bits are 0xffff minus the threshold's lower 16
    bits, or zero if the cell has no threshold.

    `encode_tile` adds the quotient's lower 16 bits to the entry. If the quotient is above the
    threshold, the addition carries into the upper 16 bits, which are then the magnitude's index.
    The first and the last cell have no threshold. Quotients below the first cell use the first
    cell; quotients above the last cell use the last cell.
    """
    bits = table.thresholds.view(torch.int32)
    upper = bits >> 16
    assert bool((upper.diff() > 0).all()), f"{table.name}: two thresholds are in one cell"
    first_cell, last_cell = int(upper[0]) - 1, int(upper[-1]) + 1
    num_before = torch.searchsorted(upper, torch.arange(first_cell, last_cell + 1).int())
    cells = (num_before << 16).int()
    cells[upper - first_cell] |= 0xFFFF - (bits & 0xFFFF)
    return first_cell, cells
