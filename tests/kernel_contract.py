"""Kernels of 8-bit and 4-bit types return the bits of the reference, `quantization`."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import codec_cases as cases
from paceline.codecs import quantization
from paceline.codecs.quantization import (
    FOUR_BIT_TABLES,
    TABLES,
    EncodedBlocks,
    QuantizationTable,
    join,
    split,
    table,
)

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
EXTREME = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 1.0]
ODD_SCALES = (0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38)
SIZES = (1, 2, 5, 6, 64, 1000, 1024, 1500, 8192, 8193, 8194, 30_000)
each_name = pytest.mark.parametrize("name", [*TABLES, *FOUR_BIT_TABLES])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


class KernelContract:
    """Tests of kernels on the device `on`; by default those of Triton.

    Triton needs a GPU, unless TRITON_INTERPRET was set before Triton was imported.
    """

    on = "cpu"
    block_sizes: tuple[int, ...] = (64, 100, 1024, 8192, 65536)
    most = 1_000_003

    def encode(
        self, values: Tensor, scales: Tensor | None, block_size: int, one: QuantizationTable
    ) -> tuple[Tensor, Tensor, int]:
        from paceline.codecs import triton_kernels

        codes, scales, num_nonfinite = triton_kernels.encode(values, scales, block_size, one)
        return codes, scales, int(num_nonfinite)

    def decode(self, values: Tensor, encoded: EncodedBlocks, adds: bool) -> None:
        from paceline.codecs import triton_kernels

        triton_kernels.decode(values, encoded, adds)

    def check_encode(
        self, values: Tensor, name: str, block_size: int, scale: float | None = None, at: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Compare codes, scales and the number of non-finite values; return codes and scales.

        `at`: number of values in memory before the first one, to test unaligned memory.
        """
        one, scales = table(name), None
        expected_scales = quantization.scales_of(values, block_size)
        if scale is not None:
            scales = expected_scales.fill_(scale).to(self.on, copy=True)
        expected = quantization.encode(values, expected_scales, block_size, one)
        if name in FOUR_BIT_TABLES:
            expected = join(expected)
        found = self.encode(self._shifted(values, at), scales, block_size, one)
        codes, scales, num_nonfinite = found
        assert torch.equal(codes.cpu(), expected)
        assert same_bits(scales.cpu(), expected_scales)
        assert num_nonfinite == len(values) - int(values.isfinite().sum())
        return expected, expected_scales

    def check_decode(
        self, codes: Tensor, scales: Tensor, name: str, block_size: int, count: int, at: int = 0
    ) -> None:
        """Compare decoded values, and sums with them, bit by bit; `count`: number of codes."""
        one, totals = table(name), cases.normal(count, 1)
        single = split(codes, count) if name in FOUR_BIT_TABLES else codes
        meant = quantization.decode(EncodedBlocks(single, scales, block_size, one))
        own = EncodedBlocks(self._shifted(codes, at), scales.to(self.on), block_size, one)
        for adds, expected in ((False, meant), (True, totals + meant)):
            found = self._shifted(totals, at)
            self.decode(found, own, adds)
            assert same_bits(found.cpu(), expected)
            assert found._base[[0, -1] if at else [-1]].isnan().all()  # untouched

    def check(self, values: Tensor, name: str, block_size: int, at: int = 0) -> None:
        """Compare codes, scales, number of non-finite values, decoded values and sums."""
        found = self.check_encode(values, name, block_size, None, at)
        self.check_decode(*found, name, block_size, len(values), at)

    def _shifted(self, values: Tensor, at: int) -> Tensor:
        """Copy values into new memory, after `at` values and before one: NaN or 255.

        A kernel that reads out of bounds then finds too many non-finite values.
        """
        around = torch.nan if values.is_floating_point() else 255
        memory = torch.full((at + len(values) + 1,), around, dtype=values.dtype, device=self.on)
        memory[at:-1] = values
        return memory[at:-1]

    @each_name
    @pytest.mark.parametrize("scale", cases.SCALES)
    def test_bin_edges(self, name: str, scale: float):
        edges = cases.bin_edges(table(name), scale)
        rows = edges[: len(edges) // 63 * 63].view(-1, 63)
        self.check(torch.cat([torch.full((len(rows), 1), scale), rows], 1).flatten(), name, 64)
        if name in TABLES:  # 4-bit types have no fixed scales
            self.check_encode(edges, name, 1024, scale)

    @each_name
    def test_all_sixteen_bit_values_and_denormals(self, name: str):
        """Includes both zeros, infinities and NaNs."""
        sixteen = (cases.sixteen_bits(dtype) for dtype in (torch.bfloat16, torch.float16))
        for values in (cases.denormals(), *sixteen):
            for block_size in self.block_sizes:
                self.check(values, name, block_size)
                for scale in (1.0, 1e-3, 1e-40) if name in TABLES else ():
                    self.check_encode(values, name, block_size, scale)

    def test_small_scales_and_scales_that_scale_nothing(self):
        for scale in (1e-44, 1e-40, 1e-38):
            self.check_encode(cases.denormals(), "dynamic8", 100, scale)
        for scale in (0.0, -1.0, torch.nan, torch.inf):
            self.check_encode(cases.normal(100), "dynamic8", 64, scale)

    @pytest.mark.parametrize("at", [0, 1])
    @pytest.mark.parametrize("block_size", SIZES)
    def test_any_length_block_size_and_alignment(self, block_size: int, at: int):
        """Blocks share a tile, fill one, need several, or exceed the largest tile."""
        for count in (0, 1, 2, 3, 63, 64, 65, 1023, 1025, 9001, self.most):
            values = cases.normal(count)
            values[3::1111], values[5::999] = torch.nan, -torch.inf
            self.check(values, "dynamic8", block_size, at)
            self.check_encode(values, "dynamic8", block_size, 2.0, at)
            if block_size % 2 == 0:
                self.check(values, "e3m0", block_size, at)

    @each_name
    def test_all_codes_decode_and_are_added_with_two_roundings(self, name: str):
        """Includes unused codes, and denormal, negative and huge scales."""
        scales = torch.tensor([*ODD_SCALES, *cases.normal(30)])
        codes = torch.arange(256).to(torch.uint8).repeat(len(scales))
        block_size = 512 if name in FOUR_BIT_TABLES else 256
        self.check_decode(codes, scales, name, block_size, block_size * len(scales))
        if name in FOUR_BIT_TABLES:  # the last byte has one code
            self.check_decode(codes, scales, name, block_size, block_size * len(scales) - 1)

    @given(
        st.lists(FLOATS | st.sampled_from(EXTREME), max_size=150),
        st.integers(1, 45),
        st.sampled_from(list(TABLES)),
        st.sampled_from(list(FOUR_BIT_TABLES)),
    )
    @settings(suppress_health_check=[HealthCheck.differing_executors])
    def test_anything(self, values: list[float], half_block: int, name: str, four_bits: str):
        values32 = torch.tensor(values, dtype=torch.float32)
        for block_size in (2 * half_block - 1, 2 * half_block):
            self.check(values32, name, block_size)
        self.check(values32, four_bits, 2 * half_block)
