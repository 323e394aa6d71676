"""Triton kernels return the bits of the reference, on a GPU and in Triton's interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec_cases as cases
from paceline.codecs.quantization import FOUR_BIT_TABLES, TABLES, QuantizationTable, table

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
ODD_SCALES = (0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38)


def edges_of(one: QuantizationTable, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table's edges, and the edges in blocks of 64 whose largest value is `scale`."""
    edges = cases.bin_edges(one, scale)
    rows = edges[: len(edges) // 63 * 63].view(-1, 63)
    return edges, torch.cat([torch.full((len(rows), 1), scale), rows], 1).flatten()


def with_infinities(count: int) -> torch.Tensor:
    values = cases.normal(count)
    values[3::1111], values[5::999] = torch.nan, -torch.inf
    return values


class KernelContract:
    """Tests of all kernels; a subclass sets the device `on`."""

    on: str

    def sizes(self, *counts: int) -> tuple[int, ...]:
        return counts if self.on == "cpu" else (*counts, 1_000_003)

    @pytest.mark.parametrize("name", TABLES)
    @pytest.mark.parametrize("scale", cases.SCALES)
    def test_bin_edges(self, name: str, scale: float):
        edges, with_scale = edges_of(table(name), scale)
        cases.check_encode(edges, name, 1024, scale, self.on)
        cases.check_encode(with_scale, name, 64, device=self.on)

    @pytest.mark.parametrize("name", TABLES)
    @pytest.mark.parametrize(
        ("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1e-3), (torch.float16, 1e-40)]
    )
    def test_all_sixteen_bit_values(self, name: str, dtype: torch.dtype, scale: float):
        values = cases.sixteen_bits(dtype)
        for block_size in (4096,) if self.on == "cpu" else (64, 1024, 8192, 65536):
            for given_scale in (None, scale):
                cases.check_encode(values, name, block_size, given_scale, self.on)

    def test_denormals_and_scales_that_scale_nothing(self):
        for scale in (None, 1e-44, 1e-40, 1e-38, 1.0):
            cases.check_encode(cases.denormals(), "dynamic8", 100, scale, self.on)
        for scale in (0.0, -1.0, torch.nan, torch.inf):
            cases.check_encode(cases.normal(100), "dynamic8", 64, scale, self.on)

    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("block_size", [1, 5, 64, 1000, 1024, 1500, 8192, 8193, 30_000])
    def test_any_length_block_size_and_alignment(self, block_size: int, offset: int):
        """Blocks share a tile, fill one, need several, or exceed the largest tile."""
        for count in self.sizes(0, 1, 1023, 1025, 9000):
            values = with_infinities(count)
            for scale in (None, 2.0):
                cases.check_encode(values, "dynamic8", block_size, scale, self.on, offset)
            codes = torch.arange(count).mul(37).to(torch.uint8)
            scales = cases.normal(-(-count // block_size))
            cases.check_decode(codes, scales, "dynamic8", block_size, self.on, offset)

    def test_all_codes_decode_and_are_added_with_two_roundings(self):
        scales = torch.tensor([*ODD_SCALES, *cases.normal(30)])
        codes = torch.arange(256).to(torch.uint8).repeat(len(scales))
        for name in TABLES:
            cases.check_decode(codes, scales, name, 256, self.on)
        for name in FOUR_BIT_TABLES:
            cases.check_decode(codes, scales, name, 512, self.on, count=512 * len(scales))

    @given(
        st.lists(FLOATS, max_size=80),
        st.integers(1, 45),
        st.sampled_from(list(TABLES)),
        st.sampled_from(list(FOUR_BIT_TABLES)),
    )
    def test_anything(self, values: list[float], half_block: int, name: str, four_bits: str):
        values32 = torch.tensor(values, dtype=torch.float32)
        for block_size in (2 * half_block - 1, 2 * half_block):
            cases.check_encode(values32, name, block_size, None, self.on)
        cases.check_four_bit(values32, four_bits, 2 * half_block, self.on)

    @pytest.mark.parametrize("name", FOUR_BIT_TABLES)
    @pytest.mark.parametrize("scale", cases.SCALES)
    def test_four_bit_bin_edges(self, name: str, scale: float):
        _, with_scale = edges_of(table(name), scale)
        cases.check_four_bit(with_scale, name, 64, self.on)

    @pytest.mark.parametrize("name", FOUR_BIT_TABLES)
    def test_four_bits_of_sixteen_bit_values_and_denormals(self, name: str):
        sixteen = (cases.sixteen_bits(dtype) for dtype in (torch.bfloat16, torch.float16))
        for values in (cases.denormals(), *sixteen):
            for block_size in (100,) if self.on == "cpu" else (64, 1024, 8192, 65536):
                cases.check_four_bit(values, name, block_size, self.on)

    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("block_size", [2, 6, 64, 1000, 1024, 1500, 8192, 8194, 30_000])
    def test_four_bits_at_any_length_block_size_and_alignment(self, block_size: int, offset: int):
        for count in self.sizes(0, 1, 2, 3, 63, 64, 65, 1023, 1025, 9001):
            cases.check_four_bit(with_infinities(count), "e3m0", block_size, self.on, offset)
