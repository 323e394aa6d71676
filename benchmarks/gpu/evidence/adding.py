"""Add arrays with few thread blocks, to load a GPU as a collective's kernels do."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_THREADS_PER_WARP = 32
_NUM_WARPS = 16  # as in an NCCL block
_TILE = 4 * _THREADS_PER_WARP * _NUM_WARPS  # values: 16 bytes per thread


@triton.jit
def add_tiles(target, source, num_tiles, tile: tl.constexpr):
    """Add this block's tiles of `source` to `target`."""
    places = tl.arange(0, tile)
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        here = target + index.to(tl.int64) * tile + places
        tl.store(here, tl.load(here) + tl.load(source + index.to(tl.int64) * tile + places))


def add(target: Tensor, source: Tensor, num_blocks: int) -> None:
    """Add float32 `source` to `target` with `num_blocks` blocks, except a partial last tile."""
    with torch.cuda.device(target.device):
        num_tiles = len(target) // _TILE
        add_tiles[(num_blocks,)](target, source, num_tiles, tile=_TILE, num_warps=_NUM_WARPS)
