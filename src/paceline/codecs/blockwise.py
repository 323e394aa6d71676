"""Eight bits a value, by a table: the pure-torch version, which specifies what kernels do."""

import torch
from torch import Tensor

from paceline.codecs.table import Table


def scales_of(values: Tensor, block_size: int) -> Tensor:
    """Return the largest finite magnitude of each block, float32 [ceil(count / block_size)]."""
    finite = torch.where(values.isfinite(), values, 0.0).abs()
    return in_blocks(finite, block_size).amax(1)


def encode(values: Tensor, scales: Tensor, block_size: int, table: Table) -> Tensor:
    """Return the code nearest to each value over its block's scale: uint8 [count].

    The quotient is rounded to float32, and what exceeds the table has its largest magnitude. Values
    that are not finite, and those of a block whose scale is zero, are zero. Zeros lose their sign.
    """
    finite = torch.where(values.isfinite(), values, 0.0)
    quotients = in_blocks(finite, block_size) / scales.unsqueeze(1)
    magnitudes = torch.where(scales.unsqueeze(1) > 0, quotients, 0.0).abs().flatten()[: len(values)]
    indices = torch.searchsorted(table.thresholds.to(values.device), magnitudes)
    negative = (finite < 0) & (indices > 0)
    return (indices + 128 * negative).to(torch.uint8)


def decode(codes: Tensor, scales: Tensor, block_size: int, table: Table) -> Tensor:
    """Return the codes' values times their block's scale, float32 [count]."""
    values = table.values.to(codes.device)[codes.long()]
    return (in_blocks(values, block_size) * scales.unsqueeze(1)).flatten()[: len(codes)]


def in_blocks(values: Tensor, block_size: int) -> Tensor:
    """Return the values as [blocks, block_size], the last one filled up with zeros."""
    missing = -len(values) % block_size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, block_size)
