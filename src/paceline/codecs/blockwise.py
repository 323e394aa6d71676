"""Eight bits a value, by a table: the pure-torch version, which specifies what kernels do."""

import torch
from torch import Tensor

from paceline.codecs.table import Table


def scales_of(values: Tensor, block_size: int) -> Tensor:
    """Return the largest finite magnitude of each block, float32 [ceil(count / block_size)]."""
    return in_blocks(_finite(values).abs(), block_size).amax(1)


def num_nonfinite(values: Tensor) -> int:
    """Return how many values are NaN or infinite."""
    return len(values) - int(values.isfinite().sum())


def encode(values: Tensor, scales: Tensor, block_size: int, table: Table) -> Tensor:
    """Return the code nearest to each value over its block's scale: uint8 [count].

    The quotient is rounded to float32, and what exceeds the table has its largest magnitude. Values
    that are not finite, and those of a block whose scale is zero, are zero. Zeros lose their sign.
    """
    magnitudes = _quotients(values, scales, block_size)
    indices = torch.searchsorted(table.thresholds.to(values.device), magnitudes)
    return _signed(indices, values)


def encode_stochastic(
    values: Tensor,
    scales: Tensor,
    block_size: int,
    table: Table,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return one of the two codes around each value over its block's scale: uint8 [count].

    Each is as likely as the value is near to it, so that codes mean the value on average, but for
    2^-24 of their distance: random numbers are float32. What is in the table has its own code, and
    what exceeds it the largest. `generator`, torch's global one by default, is on the values'
    device.
    """
    magnitudes = _quotients(values, scales, block_size)
    entries = table.magnitudes.to(values.device)
    below = torch.searchsorted(entries, magnitudes, right=True) - 1
    above = (below + 1).clamp_max(len(entries) - 1)
    distances = entries[above] - entries[below]
    chance = torch.rand(len(values), generator=generator, device=values.device)
    goes_up = chance * distances < magnitudes - entries[below]
    return _signed(torch.where(goes_up, above, below), values)


def decode(codes: Tensor, scales: Tensor, block_size: int, table: Table) -> Tensor:
    """Return the codes' values times their block's scale, float32 [count]."""
    values = table.values.to(codes.device)[codes.long()]
    return (in_blocks(values, block_size) * scales.unsqueeze(1)).flatten()[: len(codes)]


def in_blocks(values: Tensor, block_size: int) -> Tensor:
    """Return the values as [blocks, block_size], the last one filled up with zeros."""
    missing = -len(values) % block_size
    return torch.nn.functional.pad(values, (0, missing)).view(-1, block_size)


def _finite(values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), values, 0.0)


def _quotients(values: Tensor, scales: Tensor, block_size: int) -> Tensor:
    """Return the magnitudes over their block's scale, float32 [count]."""
    quotients = in_blocks(_finite(values), block_size) / scales.unsqueeze(1)
    known = torch.where(scales.unsqueeze(1) > 0, quotients, 0.0)
    return known.abs().flatten()[: len(values)]


def _signed(indices: Tensor, values: Tensor) -> Tensor:
    negative = (_finite(values) < 0) & (indices > 0)
    return (indices + 128 * negative).to(torch.uint8)
