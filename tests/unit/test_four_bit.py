"""4-bit codes: the specification against numpy, by the definition, and kernels against it.

A code is the nearest of eight magnitudes times the block's largest, and a sign; of two that are
equally near, the smaller one.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import codec_cases as cases
from paceline.codecs import blockwise
from paceline.codecs.codec import Payload
from paceline.codecs.feedback import ErrorFeedback
from paceline.codecs.four_bit import FOUR_BIT_TABLES, FourBit, four_bit_table, join, split
from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput
from paceline.native import (
    FourBitTable,
    decode_four_bit_into,
    encode_four_bit_into,
    instruction_sets,
)

SETS = ["portable"]
if "avx2" in instruction_sets():
    SETS.append("avx2")
if {"avx2", "avx512f"} <= set(instruction_sets()):
    SETS.append("avx512")
NAMES = tuple(FOUR_BIT_TABLES)
KERNELS = [(name, instruction_set) for name in NAMES for instruction_set in SETS]
BLOCK = 64
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
# By hand: powers of 2; and the middles of 4, 2 and 1 equal parts of (0.1, 1), over 1, 10 and 100.
MAGNITUDES = {
    "e3m0": [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1],
    "dynamic4": [0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875],
}
EXTREME = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 1.0]


def codes_by_numpy(values: Tensor, name: str, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes and scales, value by value, by all distances in float64."""
    magnitudes = np.array(MAGNITUDES[name], np.float32).astype(np.float64)
    found, scales = [], []
    numbers = values.numpy()
    for begin in range(0, len(numbers), block_size):
        block = numbers[begin : begin + block_size]
        block = np.where(np.isfinite(block), block, np.float32(0))
        scale = np.abs(block).max()
        scales.append(scale)
        with np.errstate(over="ignore", under="ignore"):
            quotients = np.abs(block) / scale if scale > 0 else np.zeros_like(block)
        nearest = np.abs(quotients.astype(np.float64)[:, None] - magnitudes).argmin(1)
        found += [
            int(code) + 8 * (code > 0 and v < 0) for code, v in zip(nearest, block, strict=True)
        ]
    found += [0] * (len(found) % 2)
    pairs = [low + 16 * high for low, high in zip(found[::2], found[1::2], strict=True)]
    return np.array(pairs, np.uint8), np.array(scales, np.float32)


def specified(values: Tensor, name: str, block_size: int) -> tuple[Tensor, Tensor]:
    scales = blockwise.scales_of(values, block_size)
    return join(blockwise.encode(values, scales, block_size, four_bit_table(name))), scales


def meant(codes: Tensor, scales: Tensor, name: str, block_size: int, count: int) -> Tensor:
    return blockwise.decode(split(codes, count), scales, block_size, four_bit_table(name))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def native(name: str) -> FourBitTable:
    one = four_bit_table(name)
    return FourBitTable(one.magnitudes.tolist(), one.thresholds.tolist())


def check(
    values: Tensor, name: str, instruction_set: str, block_size: int = BLOCK, threads: int = 1
) -> None:
    """Compare a kernel's codes, scales, values and sums with the specification's."""
    table, count = native(name), len(values)
    around = torch.full((-(-count // 2) + 2,), 77, dtype=torch.uint8)
    codes, scales = around[1:-1], torch.full((-(-count // block_size),), -1.0)
    bad = encode_four_bit_into(codes, scales, values, block_size, table, threads, instruction_set)
    expected, expected_scales = specified(values, name, block_size)
    assert torch.equal(codes, expected)
    assert same_bits(scales, expected_scales)
    assert bad == int((~values.isfinite()).sum())
    assert around[[0, -1]].tolist() == [77, 77]  # nothing is written beside the codes
    check_decode(codes, scales, name, instruction_set, block_size, count, threads)


def check_decode(codes, scales, name, instruction_set, block_size, count, threads=1) -> None:
    expected = meant(codes, scales, name, block_size, count)
    for adds in (False, True):
        memory = torch.linspace(-3, 3, count + 2)
        before, total = memory.clone(), memory[1:-1]
        decode_four_bit_into(
            total, codes, scales, block_size, native(name), adds, threads, instruction_set
        )
        assert same_bits(total, before[1:-1] + expected if adds else expected)
        assert torch.equal(memory[[0, -1]], before[[0, -1]])


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_what_their_definition_says(name: str):
    expected = torch.tensor(MAGNITUDES[name], dtype=torch.float64)
    assert torch.equal(four_bit_table(name).magnitudes, expected.float())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2, 9, 64, 65, 1000])
def test_the_specification_is_the_nearest_code_of_a_naive_search(name: str, count: int):
    values = cases.normal(count) * 10 ** cases.normal(count, 1)
    values[5::7], values[3::31] = 0.0, torch.nan
    codes, scales = specified(values, name, BLOCK)
    expected, expected_scales = codes_by_numpy(values, name, BLOCK)
    assert codes.numpy().tolist() == expected.tolist()
    assert scales.numpy().tolist() == expected_scales.tolist()


@pytest.mark.parametrize("name", NAMES)
@given(st.lists(FLOATS | st.sampled_from(EXTREME), max_size=80), st.sampled_from([2, 6, 64]))
def test_the_specification_is_naive_on_anything(name: str, values: list[float], block_size: int):
    numbers = torch.tensor(values, dtype=torch.float32)
    codes, _ = specified(numbers, name, block_size)
    assert codes.tolist() == codes_by_numpy(numbers, name, block_size)[0].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_value_in_the_middle_of_two_codes_becomes_the_smaller(name: str):
    one = four_bit_table(name)
    exact = (one.magnitudes[1:].double() + one.magnitudes[:-1].double()) / 2
    middles = exact[exact == exact.float()].float()
    assert len(middles) > 0 or name != "e3m0"
    with_scale = torch.cat([torch.ones(1), middles])
    codes = split(specified(with_scale, name, 1024)[0], len(with_scale))[1:]
    smaller = [int((one.thresholds < middle).sum()) for middle in middles]
    assert codes.tolist() == smaller


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
@pytest.mark.parametrize("scale", cases.SCALES)
def test_kernels_equal_the_specification_on_every_bin_edge(name, instruction_set, scale):
    edges = cases.bin_edges(four_bit_table(name), scale)
    rows = edges[: len(edges) // 63 * 63].view(-1, 63)
    check(torch.cat([torch.full((len(rows), 1), scale), rows], 1).flatten(), name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_equal_the_specification_on_all_sixteen_bit_values(name, instruction_set, dtype):
    """Denormals, zeros of both signs, infinities and NaNs among them."""
    values = cases.sixteen_bits(dtype)
    check(values, name, instruction_set)
    check(values, name, instruction_set, block_size=4096)
    check(cases.denormals(), name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
def test_kernels_equal_the_specification_at_any_length(name: str, instruction_set: str):
    """Around the borders of blocks, of bytes, and of the vectors of all kernels."""
    for count in (*range(140), 1023, 1024, 1025, 2049):
        check(cases.normal(count, count), name, instruction_set)
        check(cases.normal(count, count), name, instruction_set, block_size=2)
        check(cases.normal(count, count), name, instruction_set, block_size=34)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
@pytest.mark.parametrize("offset", range(1, 9))
def test_kernels_take_values_at_any_address(name: str, instruction_set: str, offset: int):
    check(cases.normal(300 + offset)[offset:], name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
@given(values=st.lists(FLOATS | st.sampled_from(EXTREME), max_size=150))
def test_kernels_equal_the_specification_on_anything(name, instruction_set, values: list[float]):
    check(torch.tensor(values, dtype=torch.float32), name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), KERNELS)
def test_all_codes_decode_and_are_added_with_two_roundings(name: str, instruction_set: str):
    """Those that no encoder writes, too, and scales that are denormal, negative and huge."""
    scales = torch.tensor([0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38, *cases.normal(30)])
    codes = torch.arange(256).to(torch.uint8).repeat(len(scales))
    check_decode(codes, scales, name, instruction_set, 512, 512 * len(scales))
    check_decode(codes, scales, name, instruction_set, 512, 512 * len(scales) - 1)


def test_threads_do_not_change_a_bit():
    values = cases.normal(3_000_001)
    check(values, "e3m0", "fastest", 1024, threads=1)
    check(values, "e3m0", "fastest", 1024, threads=3)


def test_kernels_refuse_what_does_not_fit():
    table, values = native("e3m0"), torch.zeros(100)
    codes, scales = torch.zeros(50, dtype=torch.uint8), torch.zeros(2)
    for few, sizes, block, said in (
        (codes[1:], scales, 64, "do not fit together"),
        (codes, scales[1:], 64, "do not fit together"),
        (codes, torch.zeros(4), 33, "an even number"),
        (codes, scales, 0, "at least one value"),
    ):
        with pytest.raises(ValueError, match=said):
            encode_four_bit_into(few, sizes, values, block, table, 1)
        with pytest.raises(ValueError, match=said):
            decode_four_bit_into(values, few, sizes, block, table, False, 1)
    with pytest.raises(ValueError, match="instruction set"):
        encode_four_bit_into(codes, scales, values, 64, table, 1, "mmx")
    for magnitudes, thresholds in (
        ([0.0] * 8, [0.5] * 6),
        ([0.0] * 7, [0.5] * 7),
        ([0.0] * 8, [0.0] * 7),
    ):
        with pytest.raises(ValueError, match="8 magnitudes"):
            FourBitTable(magnitudes, thresholds)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1023, 1024, 1025, 5001])
@pytest.mark.parametrize("name", NAMES)
def test_two_values_share_a_byte_and_a_block_has_a_scale(name: str, count: int):
    payload = find_codec(name).encode(cases.normal(count))
    sizes = [buffer.numel() for buffer in payload.buffers]
    assert sizes == [4 * -(-count // 1024), -(-count // 2)]
    assert payload.nbytes == find_codec(name).nbytes(count)


@pytest.mark.parametrize("block_size", [-2, 0, 1, 33])
def test_a_block_without_an_even_number_of_values_is_refused(block_size: int):
    with pytest.raises(InvalidInput, match="must be even"):
        FourBit("e3m0", block_size)


def test_another_type_and_another_block_size_are_refused():
    with pytest.raises(InvalidInput, match="'e2m1' is not known; choose one of e3m0, dynamic4"):
        FourBit("e2m1")
    payload = FourBit("e3m0", 64).encode(cases.normal(10))
    with pytest.raises(InvalidInput, match="made by codec 'e3m0/64', and not by 'e3m0/1024'"):
        FourBit("e3m0").decode(payload)


@given(st.binary(max_size=80), st.integers(0, 300), st.integers(0, 80))
def test_a_payload_with_wrong_contents_is_refused_or_decoded(body: bytes, count: int, cut: int):
    whole = torch.tensor(list(body), dtype=torch.uint8)
    codec = FourBit("dynamic4", 16)
    payload = Payload(codec.name, count, (whole[:cut], whole[cut:]))
    fits = payload.nbytes == codec.nbytes(count) and min(cut, len(body)) == 4 * -(-count // 16)
    if fits:
        assert len(codec.decode(payload)) == count
    else:
        with pytest.raises(InvalidInput):
            codec.decode(payload)


def test_parts_of_larger_tensors_are_decoded_into_gaps_too():
    codec, values = FourBit("e3m0"), cases.normal(100)
    payload, apart = codec.encode(values), torch.zeros(100, 2)
    codec.decode(payload, out=apart[:, 1])
    codec.add_to(apart[:, 1], payload)
    assert torch.equal(apart[:, 1], 2 * codec.decode(payload))


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_is_named_and_owes_what_was_lost(name: str):
    """What was sent and what is still owed are together what was given, but for rounding."""
    codec = find_codec(f"{name}+feedback")
    assert isinstance(codec, ErrorFeedback)
    assert not codec.encodes_sums
    given_s, sent = torch.zeros(3000), torch.zeros(3000)
    for step in range(20):
        values = cases.normal(3000, step)
        given_s += values
        sent += codec.decode(codec.encode(values))
    owed = codec.state_dict()["error"]
    assert torch.allclose(sent + owed, given_s, atol=1e-4)
    assert owed.abs().mean() < 0.5  # and it does not grow: a value's magnitude is 0.8 on average


@pytest.mark.parametrize(("name", "most"), [("e3m0", 0.04), ("dynamic4", 0.032)])
def test_four_bits_lose_this_much_of_normal_values(name: str, most: float):
    """The mean square of the errors, over that of the values."""
    values = cases.normal(1 << 20)
    codec = find_codec(name)
    lost = (codec.decode(codec.encode(values)) - values).square().mean() / values.square().mean()
    assert 0.8 * most < lost < most
