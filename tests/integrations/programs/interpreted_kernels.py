"""Triton's kernels against the specification, run by Triton's interpreter on the CPU.

Run by test_triton_kernels.py in a process of its own: Triton reads the variable when it is
imported, and from then on all kernels of a process are interpreted.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec_cases as cases
from paceline.codecs.blockwise import TABLES, table
from paceline.codecs.four_bit import FOUR_BIT_TABLES, four_bit_table
from paceline.codecs.triton_kernels import cells_of

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
# What overflows is infinite, as it is meant to be; numpy, which interprets, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("scale", cases.SCALES)
def test_bin_edges(name: str, scale: float):
    edges = cases.bin_edges(table(name), scale)
    cases.check_encode(edges, name, 1024, scale)
    rows = edges[: len(edges) // 63 * 63].view(-1, 63)
    with_scale = torch.cat([torch.full((len(rows), 1), scale), rows], 1)
    cases.check_encode(with_scale.flatten(), name, 64)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1.0), (torch.float16, 1e-3)])
def test_all_sixteen_bit_values(name: str, dtype: torch.dtype, scale: float):
    values = cases.sixteen_bits(dtype)
    cases.check_encode(values, name, 4096)
    cases.check_encode(values, name, 1024, scale)


@pytest.mark.parametrize("scale", [None, 1e-44, 1e-40, 1e-38, 1.0])
def test_denormals(scale: float | None):
    cases.check_encode(cases.denormals(), "dynamic8", 100, scale)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan, torch.inf])
def test_scales_that_scale_nothing(scale: float):
    cases.check_encode(cases.normal(100), "dynamic8", 64, scale)


@pytest.mark.parametrize("count", [0, 1, 1023, 1025, 9000])
@pytest.mark.parametrize("block_size", [1, 5, 64, 1000, 1024, 1500, 8192, 8193, 30_000])
def test_any_length_and_block_size(count: int, block_size: int):
    """Blocks that share a tile, fill one, need several, and are longer than a tile can be."""
    values = cases.normal(count)
    values[3::1111], values[5::999] = torch.nan, -torch.inf
    cases.check_encode(values, "dynamic8", block_size)
    cases.check_encode(values, "dynamic8", block_size, 2.0)
    codes = torch.arange(count).mul(37).to(torch.uint8)
    cases.check_decode(codes, cases.normal(-(-count // block_size)), "dynamic8", block_size)


@pytest.mark.parametrize("name", TABLES)
def test_all_codes_decode_and_are_added_with_two_roundings(name: str):
    scales = torch.tensor([0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38, *cases.normal(30)])
    cases.check_decode(torch.arange(256).to(torch.uint8).repeat(len(scales)), scales, name, 256)


@settings(max_examples=30)
@given(st.lists(FLOATS, max_size=80), st.integers(1, 90), st.sampled_from(list(TABLES)))
def test_anything(values: list[float], block_size: int, name: str):
    cases.check_encode(torch.tensor(values, dtype=torch.float32), name, block_size)


@pytest.mark.parametrize("name", TABLES)
def test_cells_hold_every_threshold(name: str):
    first, cells = cells_of(table(name))
    thresholds = table(name).thresholds
    above = thresholds.nextafter(torch.tensor(2.0))
    for values, more in ((thresholds, 0), (above, 1)):
        bits = values.view(torch.int32)
        found = (cells[(bits >> 16) - first] + (bits & 0xFFFF)) >> 16
        assert torch.equal(found, torch.arange(len(values), dtype=torch.int32) + more)


@pytest.mark.parametrize("name", FOUR_BIT_TABLES)
@pytest.mark.parametrize("scale", cases.SCALES)
def test_four_bit_bin_edges(name: str, scale: float):
    edges = cases.bin_edges(four_bit_table(name), scale)
    rows = edges[: len(edges) // 63 * 63].view(-1, 63)
    with_scale = torch.cat([torch.full((len(rows), 1), scale), rows], 1)
    cases.check_four_bit(with_scale.flatten(), name, 64)


@pytest.mark.parametrize("name", FOUR_BIT_TABLES)
def test_four_bits_of_sixteen_bit_values_and_denormals(name: str):
    for values in (cases.sixteen_bits(torch.bfloat16), cases.denormals()):
        cases.check_four_bit(values, name, 100)
    cases.check_four_bit(cases.sixteen_bits(torch.float16), name, 4096)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 63, 64, 65, 1023, 1025, 9001])
@pytest.mark.parametrize("block_size", [2, 6, 64, 1000, 1024, 1500, 8192, 8194, 30_000])
def test_four_bits_at_any_length_and_block_size(count: int, block_size: int):
    values = cases.normal(count)
    values[3::1111], values[5::999] = torch.nan, -torch.inf
    cases.check_four_bit(values, "e3m0", block_size, offset=1)


@pytest.mark.parametrize("name", FOUR_BIT_TABLES)
def test_all_four_bit_codes_decode(name: str):
    scales = torch.tensor([0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38, *cases.normal(30)])
    codes = torch.arange(256).to(torch.uint8).repeat(len(scales))
    cases.check_four_bit_decode(codes, scales, name, 512, 512 * len(scales))


@settings(max_examples=30)
@given(st.lists(FLOATS, max_size=80), st.integers(1, 45), st.sampled_from(list(FOUR_BIT_TABLES)))
def test_any_four_bits(values: list[float], half_block: int, name: str):
    cases.check_four_bit(torch.tensor(values, dtype=torch.float32), name, 2 * half_block)
