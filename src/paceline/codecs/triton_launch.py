"""Starts the kernels for CUDA, on the stream that is current on the tensors' device."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from paceline.codecs import blockwise
from paceline.codecs.table import Table
from paceline.codecs.triton_kernels import decode_tile, encode_tile

_COLUMNS = 1024  # of a tile, and its values
_MOST_COLUMNS = 8192  # where a program sees the whole of a block, to find its scale
# Four to a thread are one access of 16 bytes; encoding shares its set-up among eight.
_VALUES_PER_WARP = {"encode": 256, "decode": 128}


def encode(
    values: Tensor, scales: Tensor | None, block_size: int, table: Table
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, scales, and how many values are not finite: int64 [1], not waited for.

    Without `scales` each block's is its largest finite magnitude.
    """
    finds_scales = scales is None and block_size <= _MOST_COLUMNS
    tiles = _Tiles.of(len(values), block_size, _MOST_COLUMNS if finds_scales else _COLUMNS)
    if scales is None:
        scales = (
            torch.empty(tiles.num_blocks, device=values.device)
            if finds_scales
            else blockwise.scales_of(values, block_size)
        )
    codes = torch.empty(len(values), dtype=torch.uint8, device=values.device)
    num_nonfinite = torch.zeros(1, dtype=torch.int64, device=values.device)
    prepared = _prepared(table, values.device)
    with torch.cuda.device_of(values):
        encode_tile[(tiles.count,)](
            values,
            codes,
            scales,
            num_nonfinite,
            prepared.cells,
            len(values),
            tiles.num_blocks,
            block_size,
            tiles.num_parts,
            prepared.first_cell,
            prepared.first_cell + len(prepared.cells) - 1,
            tiles.num_rows,
            tiles.num_columns,
            finds_scales,
            num_warps=tiles.num_warps("encode"),
            enable_fp_fusion=False,
        )
    return codes, scales, num_nonfinite


def decode(
    values: Tensor, codes: Tensor, scales: Tensor, block_size: int, table: Table, adds: bool
) -> None:
    """Write what the codes mean to `values`, or add it to them."""
    tiles = _Tiles.of(len(values), block_size, _COLUMNS)
    with torch.cuda.device_of(values):
        decode_tile[(tiles.count,)](
            values,
            codes,
            scales,
            _prepared(table, values.device).meanings,
            len(values),
            tiles.num_blocks,
            block_size,
            tiles.num_parts,
            tiles.num_rows,
            tiles.num_columns,
            adds,
            num_warps=tiles.num_warps("decode"),
            enable_fp_fusion=False,
        )


@dataclass(frozen=True)
class _Tiles:
    """How blocks are cut into tiles, or put together to them: rows and columns are powers of 2."""

    num_blocks: int
    num_parts: int
    num_rows: int
    num_columns: int

    @classmethod
    def of(cls, count: int, block_size: int, most_columns: int) -> "_Tiles":
        num_columns = min(1 << (block_size - 1).bit_length(), most_columns)
        return cls(
            num_blocks=-(-count // block_size),
            num_parts=-(-block_size // num_columns),
            num_rows=max(1, _COLUMNS // num_columns),
            num_columns=num_columns,
        )

    @property
    def count(self) -> int:
        return -(-self.num_blocks // self.num_rows) * self.num_parts

    def num_warps(self, of: str) -> int:
        return self.num_rows * self.num_columns // _VALUES_PER_WARP[of]


@dataclass(frozen=True, eq=False)
class _Prepared:
    cells: Tensor
    first_cell: int
    meanings: Tensor


@cache
def _prepared(table: Table, device: torch.device) -> _Prepared:
    """Return what kernels look up of a table, on a device: cells, and float32 [256] of values."""
    first_cell, cells = cells_of(table)
    return _Prepared(cells.to(device), first_cell, table.values.to(device))


def cells_of(table: Table) -> tuple[int, Tensor]:
    """Return which upper half of a float32's bits has the first cell, and the cells, int32.

    A cell has, in its upper half, how many thresholds are in cells before it, and in the lower one
    0xffff less the lower half of the threshold within, or zero: to this a quotient's lower half is
    added, and carries over where it is greater than the threshold's. The first and the last cell
    have no threshold, and stand for all quotients that are smaller and larger.
    """
    bits = table.thresholds.view(torch.int32)
    upper = bits >> 16
    assert bool((upper.diff() > 0).all()), f"{table.name}: two thresholds are in one cell"
    first_cell, last_cell = int(upper[0]) - 1, int(upper[-1]) + 1
    num_before = torch.searchsorted(upper, torch.arange(first_cell, last_cell + 1).int())
    cells = (num_before << 16).int()
    cells[upper - first_cell] |= 0xFFFF - (bits & 0xFFFF)
    return first_cell, cells
