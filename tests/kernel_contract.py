"""Triton kernels return the bits of the reference, on a GPU and in Triton's interpreter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec_cases as cases
from paceline.codecs.quantization import FOUR_BIT_TABLES, TABLES, table

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
ODD_SCALES = (0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38)
SIZES = (1, 2, 5, 6, 64, 1000, 1024, 1500, 8192, 8193, 8194, 30_000)
each_name = pytest.mark.parametrize("name", [*TABLES, *FOUR_BIT_TABLES])


class KernelContract:
    """Tests of all kernels; a subclass sets the device `on`."""

    on: str

    @each_name
    @pytest.mark.parametrize("scale", cases.SCALES)
    def test_bin_edges(self, name: str, scale: float):
        edges = cases.bin_edges(table(name), scale)
        rows = edges[: len(edges) // 63 * 63].view(-1, 63)
        with_scale = torch.cat([torch.full((len(rows), 1), scale), rows], 1).flatten()
        cases.check(with_scale, name, 64, self.on)
        if name in TABLES:  # 4-bit types have no fixed scales
            cases.check_encode(edges, name, 1024, scale, self.on)

    @each_name
    def test_all_sixteen_bit_values_and_denormals(self, name: str):
        sixteen = (cases.sixteen_bits(dtype) for dtype in (torch.bfloat16, torch.float16))
        for values in (cases.denormals(), *sixteen):
            for block_size in (4096,) if self.on == "cpu" else (64, 100, 1024, 8192, 65536):
                cases.check(values, name, block_size, self.on)
                for scale in (1.0, 1e-3, 1e-38, 1e-40, 1e-44) if name in TABLES else ():
                    cases.check_encode(values, name, block_size, scale, self.on)

    def test_scales_that_scale_nothing(self):
        for scale in (0.0, -1.0, torch.nan, torch.inf):
            cases.check_encode(cases.normal(100), "dynamic8", 64, scale, self.on)

    @pytest.mark.parametrize("offset", [0, 1])
    @pytest.mark.parametrize("block_size", SIZES)
    def test_any_length_block_size_and_alignment(self, block_size: int, offset: int):
        """Blocks share a tile, fill one, need several, or exceed the largest tile."""
        more = () if self.on == "cpu" else (1_000_003,)
        for count in (0, 1, 2, 3, 63, 64, 65, 1023, 1025, 9001, *more):
            values = cases.normal(count)
            values[3::1111], values[5::999] = torch.nan, -torch.inf
            cases.check(values, "dynamic8", block_size, self.on, offset)
            cases.check_encode(values, "dynamic8", block_size, 2.0, self.on, offset)
            if block_size % 2 == 0:
                cases.check(values, "e3m0", block_size, self.on, offset)

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
        cases.check(values32, four_bits, 2 * half_block, self.on)
