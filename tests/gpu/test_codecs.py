"""Eight-bit and 4-bit codes on a GPU: the same bits as on the CPU, by Triton's kernels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import codec_cases as cases
from paceline.codecs import blockwise
from paceline.codecs.blockwise import TABLES, EightBit, table
from paceline.codecs.codec import Payload
from paceline.codecs.four_bit import FOUR_BIT_TABLES, FourBit, four_bit_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
needs_triton = pytest.mark.skipif(
    not blockwise._triton_compiles(), reason="Triton or a C compiler is not installed"
)
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
GIB = 2**30


@needs_triton
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("scale", cases.SCALES)
def test_bin_edges(name: str, scale: float):
    edges = cases.bin_edges(table(name), scale)
    cases.check_encode(edges, name, 1024, scale, "cuda")
    rows = edges[: len(edges) // 63 * 63].view(-1, 63)
    with_scale = torch.cat([torch.full((len(rows), 1), scale), rows], 1)
    cases.check_encode(with_scale.flatten(), name, 64, device="cuda")


@needs_triton
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, 1.0, 1e-3, 1e-40])
def test_all_sixteen_bit_values(name: str, dtype: torch.dtype, scale: float | None):
    values = cases.sixteen_bits(dtype)
    for block_size in (64, 1024, 8192, 65536):
        cases.check_encode(values, name, block_size, scale, "cuda")


@needs_triton
@pytest.mark.parametrize("scale", [None, 1e-44, 1e-40, 1e-38, 1.0, 0.0, -1.0, torch.nan, torch.inf])
def test_denormals_and_scales_that_scale_nothing(scale: float | None):
    cases.check_encode(cases.denormals(), "dynamic8", 100, scale, "cuda")


@needs_triton
@pytest.mark.parametrize("count", [0, 1, 1023, 1025, 9000, 1_000_003])
@pytest.mark.parametrize("block_size", [1, 5, 64, 1000, 1024, 1500, 8192, 8193, 300_000])
@pytest.mark.parametrize("offset", [0, 1])
def test_any_length_block_size_and_alignment(count: int, block_size: int, offset: int):
    values = cases.normal(count)
    values[3::1111], values[5::999] = torch.nan, -torch.inf
    cases.check_encode(values, "dynamic8", block_size, None, "cuda", offset)
    cases.check_encode(values, "dynamic8", block_size, 2.0, "cuda", offset)
    codes = torch.arange(count).mul(37).to(torch.uint8)
    scales = cases.normal(-(-count // block_size))
    cases.check_decode(codes, scales, "dynamic8", block_size, "cuda", offset)


@needs_triton
@pytest.mark.parametrize("name", TABLES)
def test_all_codes_decode_and_are_added_with_two_roundings(name: str):
    scales = torch.tensor([0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38, *cases.normal(300)])
    codes = torch.arange(256).to(torch.uint8).repeat(len(scales))
    cases.check_decode(codes, scales, name, 256, "cuda")


@needs_triton
@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, max_size=80), st.integers(1, 90), st.sampled_from(list(TABLES)))
def test_anything(values: list[float], block_size: int, name: str):
    cases.check_encode(torch.tensor(values, dtype=torch.float32), name, block_size, None, "cuda")


@needs_triton
@pytest.mark.parametrize("name", FOUR_BIT_TABLES)
def test_four_bit_edges_denormals_and_sixteen_bit_values(name: str):
    for scale in cases.SCALES:
        edges = cases.bin_edges(four_bit_table(name), scale)
        rows = edges[: len(edges) // 63 * 63].view(-1, 63)
        with_scale = torch.cat([torch.full((len(rows), 1), scale), rows], 1)
        cases.check_four_bit(with_scale.flatten(), name, 64, "cuda")
    for values in (cases.denormals(), *map(cases.sixteen_bits, (torch.bfloat16, torch.float16))):
        for block_size in (64, 1024, 8192, 65536):
            cases.check_four_bit(values, name, block_size, "cuda")


@needs_triton
@pytest.mark.parametrize("count", [0, 1, 2, 1023, 1025, 9001, 1_000_003])
@pytest.mark.parametrize("block_size", [2, 6, 64, 1000, 1024, 1500, 8192, 8194, 300_000])
@pytest.mark.parametrize("offset", [0, 1])
def test_four_bits_at_any_length_block_size_and_alignment(count, block_size, offset):
    values = cases.normal(count)
    values[3::1111], values[5::999] = torch.nan, -torch.inf
    cases.check_four_bit(values, "e3m0", block_size, "cuda", offset)


@needs_triton
@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, max_size=80), st.integers(1, 45), st.sampled_from(list(FOUR_BIT_TABLES)))
def test_any_four_bits(values: list[float], half_block: int, name: str):
    cases.check_four_bit(torch.tensor(values, dtype=torch.float32), name, 2 * half_block, "cuda")


@needs_triton
def test_places_beyond_32_bits():
    """Were they cut off, the last values would be written to the first ones' place."""
    if torch.cuda.mem_get_info()[0] < 24 * GIB:
        pytest.skip("the GPU has less than 24 GiB free")
    begin, end = 2**31, cases.normal(5000)
    codec, values = EightBit("dynamic8"), torch.zeros(begin + len(end), device="cuda")
    values[begin:] = end
    payload, alone = codec.encode(values), codec.encode(end)
    codes = payload.buffers[1]
    assert torch.equal(codes[begin:].cpu(), alone.buffers[1])
    assert not codes[:begin].any()
    assert torch.equal(codec.decode(payload)[begin:].cpu(), codec.decode(alone))


def same(one: Payload, other: Payload) -> bool:
    """Return True if two payloads have the same bytes, on whichever device."""
    facts = [
        (p.codec, p.count, p.num_nonfinite, [b.tolist() for b in p.buffers]) for p in (one, other)
    ]
    return facts[0] == facts[1]


@pytest.mark.parametrize("with_triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("offset", [None, 10.0])
def test_payloads_are_those_of_the_cpu(monkeypatch, with_triton: bool, name: str, offset):
    """As well where there is no Triton, and torch's own functions run on the GPU."""
    monkeypatch.setattr(blockwise, "_triton_compiles", lambda: with_triton)
    values = cases.normal(100_001)
    values[[5, 77]] = torch.nan
    codec = EightBit(name, block_size=1000, offset=offset)
    here, there = codec.encode(values), codec.encode(values.cuda())
    assert same(here, there)
    total = cases.normal(100_001, 1)
    summed = total.cuda()
    codec.add_to(summed, there)
    codec.add_to(total, here)
    assert torch.equal(summed.cpu(), total)


@needs_triton
def test_kernels_run_on_the_current_stream():
    """After work that takes long on that stream: on another they would read too early."""
    stream, codec = torch.cuda.Stream(), EightBit("linear8")
    expected = codec.encode(cases.normal(5000))
    values, meant = torch.zeros(5000, device="cuda"), cases.normal(5000).cuda()
    codec.decode(codec.encode(values))  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        values.copy_(meant)
        found = codec.encode(values)
    assert same(found, expected)


def test_stochastic_rounding_is_right_on_average():
    values = cases.normal(1000).cuda()
    torch.manual_seed(0)
    codec = EightBit("linear8", stochastic=True)
    mean = sum(codec.decode(codec.encode(values)).double() for _ in range(400)) / 400
    step = values.abs().max() / 127
    assert (mean - values).abs().max() < 5 * step / 40


@pytest.mark.parametrize("with_triton", [False, pytest.param(True, marks=needs_triton)])
@pytest.mark.parametrize("name", FOUR_BIT_TABLES)
def test_four_bit_payloads_are_those_of_the_cpu(monkeypatch, with_triton: bool, name: str):
    monkeypatch.setattr(blockwise, "_triton_compiles", lambda: with_triton)
    values = cases.normal(100_001)
    values[[5, 77]] = torch.nan
    codec = FourBit(name, block_size=1000)
    here, there = codec.encode(values), codec.encode(values.cuda())
    assert same(here, there)
    total = cases.normal(100_001, 1)
    summed = total.cuda()
    codec.add_to(summed, there)
    codec.add_to(total, here)
    assert torch.equal(summed.cpu(), total)
