"""Difficult values for codecs, and comparisons of Triton kernels with the reference.

The kernels need a GPU, unless TRITON_INTERPRET was set before Triton was imported.
"""

import torch
from torch import Tensor

from paceline.codecs import quantization
from paceline.codecs.quantization import FOUR_BIT_TABLES, join, split, table
from paceline.native import instruction_sets

INSTRUCTIONS: tuple[str, ...] = ("portable",)
if "avx2" in instruction_sets():
    INSTRUCTIONS += ("avx2",)
if {"avx2", "avx512f"} <= set(instruction_sets()):
    INSTRUCTIONS += ("avx512",)
SCALES = (1.0, 1e-3, 0.7, 3.1e9, 1e-37, 3e38)


def bin_edges(one: quantization.QuantizationTable, scale: float) -> Tensor:
    """Return thresholds and magnitudes of a table with their neighbours, times a scale."""
    edges = torch.cat([one.thresholds, one.magnitudes])
    near = [edges, edges.nextafter(torch.tensor(2.0)), edges.nextafter(torch.tensor(0.0))]
    scaled = torch.cat(near) * scale
    around = [scaled, scaled.nextafter(torch.tensor(torch.inf)), scaled.nextafter(torch.tensor(0))]
    return torch.cat([*around, *(-values for values in around)])


def sixteen_bits(dtype: torch.dtype) -> Tensor:
    """Return all values of a 16-bit type, including denormals, zeros, infinities and NaNs."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()


def denormals() -> Tensor:
    """Return zero and many float32 denormals, including the smallest."""
    small = torch.arange(-5000, 5000, dtype=torch.int32)
    bits = torch.cat([small.abs() << shift for shift in (0, 5, 10)])
    return torch.where(small.repeat(3) < 0, -1.0, 1.0) * bits.view(torch.float32)


def normal(count: int, seed: int = 0) -> Tensor:
    """Return normally distributed values."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def check_encode(
    values: Tensor,
    name: str,
    block_size: int,
    scale: float | None = None,
    device: str = "cpu",
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compare codes, scales and the number of non-finite values; return codes and scales.

    `offset`: number of values in memory before the first one, to test unaligned memory.
    """
    from paceline.codecs import triton_kernels

    one, there, scales = table(name), _shifted(values, device, offset), None
    expected_scales = quantization.scales_of(values, block_size)
    if scale is not None:
        scales = expected_scales.fill_(scale).to(device)
    expected = quantization.encode(values, expected_scales, block_size, one)
    if name in FOUR_BIT_TABLES:
        expected = join(expected)
    codes, scales, num_nonfinite = triton_kernels.encode(there, scales, block_size, one)
    assert torch.equal(codes.cpu(), expected)
    assert torch.equal(scales.cpu().view(torch.int32), expected_scales.view(torch.int32))
    assert int(num_nonfinite) == len(values) - int(values.isfinite().sum())
    return expected, expected_scales


def check_decode(
    codes: Tensor,
    scales: Tensor,
    name: str,
    block_size: int,
    device: str = "cpu",
    offset: int = 0,
    count: int | None = None,
) -> None:
    """Compare decoded values, and sums with them, bit by bit; `count`: number of codes."""
    from paceline.codecs import triton_kernels

    count = len(codes) if count is None else count
    one, totals = table(name), normal(count, 1)
    single = split(codes, count) if name in FOUR_BIT_TABLES else codes
    meant = quantization.decode(single, scales, block_size, one)
    for adds, expected in ((False, meant), (True, totals + meant)):
        found = _shifted(totals, device, offset)
        own = _shifted(codes, device, offset), scales.to(device), block_size, one
        triton_kernels.decode(found, *own, adds)
        assert torch.equal(found.cpu().view(torch.int32), expected.view(torch.int32))


def check(values: Tensor, name: str, block_size: int, device: str = "cpu", offset: int = 0) -> None:
    """Compare codes, scales, number of non-finite values, decoded values and sums."""
    found = check_encode(values, name, block_size, None, device, offset)
    check_decode(*found, name, block_size, device, offset, len(values))


def _shifted(values: Tensor, device: str, offset: int) -> Tensor:
    """Copy values to an `offset` in new memory, between NaN or 255.

    A kernel that reads out of bounds then finds too many non-finite values.
    """
    around = torch.nan if values.is_floating_point() else 255
    memory = torch.full((offset + len(values) + 1,), around, dtype=values.dtype, device=device)
    memory[offset:-1] = values
    return memory[offset:-1]
