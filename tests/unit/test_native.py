"""Native code: kernels that sum gradients, compared with torch."""

import re
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.native import instruction_sets, sum_into

SETS = instruction_sets()
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def summed(sources: list[Tensor], scale: float, kind: str, streaming: bool = False) -> Tensor:
    result = torch.full_like(sources[0], 7)
    sum_into(result, sources, scale, kind, streaming)
    return result


def expected(sources: list[Tensor], scale: float) -> Tensor:
    """Add in order, in float32 or float64, and round once at the end."""
    wide = torch.float64 if sources[0].dtype == torch.float64 else torch.float32
    total = reduce(torch.add, [source.to(wide) for source in sources])
    return (total * torch.tensor(scale, dtype=wide)).to(sources[0].dtype)


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    """Compare bits, including the sign of zero; all NaNs are equal."""
    assert torch.equal(left.isnan(), right.isnan())
    as_bits = BITS[left.dtype.itemsize]
    numbers = ~left.isnan()
    assert torch.equal(left.view(as_bits)[numbers], right.view(as_bits)[numbers])


def random(num: int, count: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num * 1000 + count)
    spread = torch.logspace(-3, 3, count) if count else torch.ones(0)
    return [(torch.randn(count, generator=generator) * spread).to(dtype) for _ in range(num)]


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num", [1, 2, 3, 4, 5])
def test_sums_have_the_bits_of_additions_in_order(kind: str, dtype: torch.dtype, num: int):
    for count in [0, 1, 3, 15, 16, 17, 63, 64, 65, 1023, 4097]:
        sources = random(num, count, dtype)
        for streaming in (False, True):
            found = summed(sources, 1 / 3, kind, streaming)
            assert_same_bits(found, expected(sources, 1 / 3))


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_nans_and_denormals(kind: str, dtype: torch.dtype):
    info = torch.finfo(dtype)
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), info.max, -info.max]
    special += [info.tiny, -info.tiny, info.tiny / 2, info.smallest_normal * info.eps, 1.0]
    values = torch.tensor(special, dtype=torch.float64).to(dtype)
    left, right = torch.meshgrid(values, values, indexing="ij")
    sources = [left.reshape(-1), right.reshape(-1)]
    for scale in (1.0, 0.5):
        assert_same_bits(summed(sources, scale, kind), expected(sources, scale))


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_comes_back_and_every_half_is_rounded_to_even(kind: str, dtype):
    everything = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_same_bits(summed([everything], 1, kind), everything)
    # Halfway between two neighbours, and a little to either side of it.
    finite = everything[everything.isfinite() & (everything > 0)].float().sort().values
    step = finite[1:] - finite[:-1]
    for part in (0.5, 0.5 - 2**-6, 0.5 + 2**-6):
        scale = 1 + part * step / finite[:-1]
        for i in range(0, len(scale), 997):
            sources = [finite[i : i + 1].to(dtype)]
            found = summed(sources, float(scale[i]), kind)
            assert_same_bits(found, expected(sources, float(scale[i])))


@pytest.mark.parametrize("kind", SETS)
def test_the_threads_own_treatment_of_denormals_does_not_matter(kind: str):
    tiny = torch.full((100,), 1e-40)
    wanted = expected([tiny, tiny], 1)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = summed([tiny, tiny], 1, kind)
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(found, wanted)
    assert (found > 0).all()


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("shift", [1, 5, 16])
def test_unaligned_results_are_right_and_nothing_else_is_written(kind: str, shift: int):
    for streaming in (False, True):
        memory = torch.full((400,), 9.0)
        sources = random(2, 300, torch.float32)
        sum_into(memory[shift : shift + 300], sources, 1.0, kind, streaming)
        assert_same_bits(memory[shift : shift + 300], expected(sources, 1))
        assert (memory[:shift] == 9).all()
        assert (memory[shift + 300 :] == 9).all()


def test_tensors_that_cannot_be_summed_are_refused():
    values = torch.zeros(3)
    for sources in ([], [torch.zeros(4)], [values.double()]):
        with pytest.raises(ValueError):  # noqa: PT011
            sum_into(values, sources)
    with pytest.raises(TypeError):
        sum_into(values.int(), [values.int()])
    with pytest.raises(ValueError, match="instruction set"):
        sum_into(values, [values], 1.0, "avx1024")


def test_instruction_sets_are_those_that_the_kernel_lists():
    flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    has = set(flags[1].split() if flags else ()).issuperset
    needed = {"portable": set(), "avx2": {"avx2", "f16c"}, "avx512": {"avx2", "f16c", "avx512f"}}
    assert instruction_sets() == [name for name, own in needed.items() if has(own)]
