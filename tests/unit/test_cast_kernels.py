"""Casts to 16-bit types against torch's own, bit by bit, on every instruction set."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import codec_cases as cases
from paceline.codecs.names import find_codec
from paceline.native import DType, cast_into, instruction_sets

SETS = ["portable"]
if "avx2" in instruction_sets():
    SETS.append("avx2")
if {"avx2", "avx512f"} <= set(instruction_sets()):
    SETS.append("avx512")
TYPES = {"half": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
KERNELS = [(name, instruction_set) for name in TYPES for instruction_set in SETS]
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def check(values: Tensor, name: str, instruction_set: str, threads: int = 1) -> None:
    memory = torch.full((2 * len(values) + 4,), 77, dtype=torch.uint8)
    found = memory[2:-2]
    num_lost = cast_into(found, values, TYPES[name], threads, instruction_set)
    by_torch = values.to(getattr(torch, name))
    lost = ~by_torch.isfinite()
    assert num_lost == int(lost.sum())
    expected = by_torch.masked_fill(lost, 0.0)
    assert torch.equal(found.clone().view(torch.int16), expected.view(torch.int16))
    assert memory[[0, 1, -2, -1]].tolist() == [77] * 4  # nothing is written beside


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
def test_casts_are_torchs_on_every_border_between_two_numbers(name: str, instruction_set: str):
    """All numbers of the type, the middles between two and their neighbours; NaN and infinity."""
    exact = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, name))
    numbers = exact.float()
    finite = numbers[numbers.isfinite()]
    middles = (finite[:-1] + finite[1:]) / 2
    most = finite[-1:].double()
    over = (most + (most - finite[-2].double()) / 2).float()  # rounds to infinity: a tie
    for values in (numbers, middles, over, torch.tensor([3.4028235e38, 1e-45])):
        near = [values, values.nextafter(values * 0), values.nextafter(values * 0 + torch.inf)]
        for one in near:
            check(torch.cat([one, -one]), name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
def test_casts_are_torchs_at_any_length_and_address(name: str, instruction_set: str):
    for count in (*range(40), 8191, 8192, 8193, 20_000):
        check(cases.normal(count + 1)[1:], name, instruction_set)
    check(cases.denormals(), name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
@given(values=st.lists(FLOATS, max_size=60))
def test_casts_are_torchs_on_anything(name: str, instruction_set: str, values: list[float]):
    check(torch.tensor(values, dtype=torch.float32), name, instruction_set)


@pytest.mark.parametrize("name", TYPES)
def test_threads_share_the_values_and_count_together(name: str):
    values = cases.normal(1_000_003)
    values[::1000] = torch.nan
    check(values, name, "fastest", threads=3)


@pytest.mark.parametrize("name", TYPES)
def test_a_codec_takes_values_in_the_order_of_flatten(name: str):
    values = cases.normal(600).view(20, 30)
    expected = values.T.reshape(-1).to(getattr(torch, name)).float()
    codec = find_codec(name)
    assert torch.equal(codec.decode(codec.encode(values.T)), expected)


def test_sizes_types_and_addresses_that_do_not_fit_are_refused():
    values, bytes_ = torch.zeros(4), torch.zeros(9, dtype=torch.uint8)
    with pytest.raises(ValueError, match="two aligned bytes"):
        cast_into(bytes_, values, DType.FLOAT16, 1)
    with pytest.raises(ValueError, match="two aligned bytes"):
        cast_into(bytes_[1:], values, DType.FLOAT16, 1)
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        cast_into(bytes_[:8], values, DType.FLOAT64, 1)
    with pytest.raises(ValueError, match="instruction set"):
        cast_into(bytes_[:8], values, DType.FLOAT16, 1, "mmx")
