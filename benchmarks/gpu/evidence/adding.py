"""A kernel of few blocks that adds up memory: what a collective's kernels take from others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_THREADS_PER_WARP = 32
_NUM_WARPS = 16  # as many as a block of NCCL's has
_TILE = 4 * _THREADS_PER_WARP * _NUM_WARPS  # of values, 16 bytes a thread


@triton.jit
def add_tiles(target, source, num_tiles, tile: tl.constexpr):
    """Add the tiles of this block, one after another."""
    places = tl.arange(0, tile)
    for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        here = target + index.to(tl.int64) * tile + places
        tl.store(here, tl.load(here) + tl.load(source + index.to(tl.int64) * tile + places))


def add(target: Tensor, source: Tensor, num_blocks: int) -> None:
    """Add float32 values to others with so many blocks; values beyond the last tile are left."""
    with torch.cuda.device(target.device):
        num_tiles = len(target) // _TILE
        add_tiles[(num_blocks,)](target, source, num_tiles, tile=_TILE, num_warps=_NUM_WARPS)
