"""Eight-bit codes: the specification against a naive search, and kernels against it, bit by bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.codecs import blockwise
from paceline.codecs.blockwise import TABLES, table
from paceline.native import Codebook, decode_into, encode_into, instruction_sets

SETS = ["portable"]
if "avx2" in instruction_sets():
    SETS.append("avx2")
if {"avx2", "avx512f"} <= set(instruction_sets()):
    SETS.append("avx512")
BLOCK = 64
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


BOOKS = [(name, instruction_set) for name in TABLES for instruction_set in SETS]


def kernel(
    values: Tensor, name: str, instruction_set: str, threads: int = 1, scale: float | None = None
):
    """Return codes, scales and how many values are not finite, by the kernel."""
    one = table(name)
    book = Codebook(one.magnitudes.tolist(), one.thresholds.tolist())
    codes = torch.full((len(values),), 77, dtype=torch.uint8)
    scales = torch.full((-(-len(values) // BLOCK),), -1.0 if scale is None else scale)
    bad = encode_into(codes, scales, values, BLOCK, book, scale is None, threads, instruction_set)
    return codes, scales, bad, book


def check(
    values: Tensor, name: str, instruction_set: str, threads: int = 1, scale: float | None = None
) -> None:
    """Compare encode, decode and decode-and-add with the specification."""
    one = table(name)
    codes, scales, bad, book = kernel(values, name, instruction_set, threads, scale)
    expected_scales = blockwise.scales_of(values, BLOCK) if scale is None else scales
    expected = blockwise.encode(values, expected_scales, BLOCK, one)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected)
    assert bad == int((~values.isfinite()).sum())
    decoded = torch.full((len(values),), torch.nan)
    decode_into(decoded, codes, scales, BLOCK, book, False, threads, instruction_set)
    reference = blockwise.decode(codes, scales, BLOCK, one)
    assert torch.equal(decoded.view(torch.int32), reference.view(torch.int32))
    total = torch.linspace(-3, 3, len(values))
    added = total.clone()
    decode_into(added, codes, scales, BLOCK, book, True, threads, instruction_set)
    assert torch.equal(added, total + reference)


@pytest.mark.parametrize("name", TABLES)
def test_the_specification_finds_the_nearest_magnitude(name: str):
    """Against all distances in float64, on values of any magnitude; ties go to the smaller one."""
    one = table(name)
    generator = torch.Generator().manual_seed(1)
    values = torch.cat(
        [
            torch.rand(4000, generator=generator),
            10 ** (-9 * torch.rand(4000, generator=generator)),
            one.thresholds,
            torch.nextafter(one.thresholds, torch.tensor(2.0)),
        ]
    )
    codes = blockwise.encode(values, torch.ones(1), len(values), one)
    distances = (values.double().unsqueeze(1) - one.magnitudes.double()).abs()
    assert torch.equal(codes.long(), distances.argmin(1))


@pytest.mark.parametrize(("name", "instruction_set"), BOOKS)
def test_kernels_equal_the_specification_on_every_bin_edge(name: str, instruction_set: str):
    one = table(name)
    above = torch.nextafter(one.thresholds, torch.tensor(2.0))
    below = torch.nextafter(one.thresholds, torch.tensor(0.0))
    edges = torch.cat([one.thresholds, above, below, one.magnitudes])
    check(torch.cat([edges, -edges]), name, instruction_set, scale=1.0)


@pytest.mark.parametrize(("name", "instruction_set"), BOOKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_equal_the_specification_on_all_sixteen_bit_values(name, instruction_set, dtype):
    """Denormals, zeros of both signs, infinities and NaNs among them."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    check(values, name, instruction_set)
    check(values, name, instruction_set, scale=1.0)
    check(values, name, instruction_set, scale=1e-3)


@pytest.mark.parametrize(("name", "instruction_set"), BOOKS)
@pytest.mark.parametrize("count", [0, 1, 7, 63, 64, 65, 200])
def test_kernels_equal_the_specification_at_any_length(name: str, instruction_set: str, count: int):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    check(values, name, instruction_set)


@pytest.mark.parametrize(("name", "instruction_set"), BOOKS)
@given(values=st.lists(FLOATS, max_size=150))
def test_kernels_equal_the_specification_on_anything(name, instruction_set, values: list[float]):
    check(torch.tensor(values, dtype=torch.float32), name, instruction_set)


def test_threads_do_not_change_a_bit():
    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    one, two = (kernel(values, "dynamic8", "fastest", threads)[:2] for threads in (1, 3))
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


@pytest.mark.parametrize(
    ("magnitudes", "thresholds"),
    [([0.0], []), ([0.0, 1.0], []), ([0.0, 1.0, 1.0001], [0.5, 0.5]), ([0.0] * 129, [1.0] * 128)],
)
def test_a_table_that_cannot_be_searched_is_refused(magnitudes, thresholds):
    with pytest.raises(ValueError, match=r"table|thresholds"):
        Codebook(magnitudes, thresholds)


def test_sizes_that_do_not_fit_are_refused():
    one = table("linear8")
    book = Codebook(one.magnitudes.tolist(), one.thresholds.tolist())
    values, codes = torch.zeros(100), torch.zeros(99, dtype=torch.uint8)
    with pytest.raises(ValueError, match="do not fit together"):
        encode_into(codes, torch.zeros(2), values, BLOCK, book, True, 1)
    with pytest.raises(ValueError, match="do not fit together"):
        decode_into(
            values, torch.zeros(100, dtype=torch.uint8), torch.zeros(1), BLOCK, book, False, 1
        )
