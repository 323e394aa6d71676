"""The C++ kernels of quantization and casts return the same bits as their specifications.

The module `quantization` specifies codes, and is checked by a naive search. Torch specifies casts.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import codec_cases as cases
from paceline.codecs import quantization
from paceline.codecs.quantization import (
    FOUR_BIT_TABLES,
    TABLES,
    QuantizationTable,
    join,
    split,
    table,
)
from paceline.native import Codebook, DType, FourBitTable, cast_into

SETS = cases.INSTRUCTIONS
BLOCK, AROUND = 64, 77
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)
EXTREME = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38, 1.0]
# By hand: powers of 2; and the centres of 4, 2 and 1 equal parts of (0.1, 1), over 1, 10 and 100.
MAGNITUDES = {
    "e3m0": [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1],
    "dynamic4": [0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875],
}


class Kernel(NamedTuple):
    """The C++ kernels of a table on some instruction sets, and their specification."""

    name: str
    sets: tuple[str, ...] = SETS

    @property
    def is_four_bit(self) -> bool:
        return self.name in FOUR_BIT_TABLES

    @property
    def table(self) -> QuantizationTable:
        return table(self.name)

    @property
    def native(self) -> Codebook | FourBitTable:
        parts = self.table.magnitudes.tolist(), self.table.thresholds.tolist()
        return FourBitTable(*parts) if self.is_four_bit else Codebook(*parts)

    def specified(
        self, values: Tensor, block_size: int, scale: float | None = None
    ) -> tuple[Tensor, Tensor]:
        scales = quantization.scales_of(values, block_size)
        if scale is not None:
            scales.fill_(scale)
        codes = quantization.encode(values, scales, block_size, self.table)
        return join(codes) if self.is_four_bit else codes, scales

    def check(
        self, values: Tensor, block_size: int = BLOCK, threads: int = 1, scale: float | None = None
    ) -> None:
        """Compare the kernels' codes, scales, values and sums with the specification's."""
        count, native = len(values), self.native
        expected, expected_scales = self.specified(values, block_size, scale)
        num_bad = int((~values.isfinite()).sum())
        for one in self.sets:
            memory = torch.full((len(expected) + 2,), AROUND, dtype=torch.uint8)
            codes = memory[1:-1]
            scales = torch.full((-(-count // block_size),), -1.0 if scale is None else scale)
            how = scale is None, threads, one
            bad = native.encode_into(codes, scales, values, block_size, *how)
            assert torch.equal(codes, expected), one
            assert same_bits(scales, expected_scales), one
            assert bad == num_bad
            assert memory[[0, -1]].tolist() == [AROUND] * 2  # untouched
        self.check_decode(expected, expected_scales, block_size, count, threads)

    def check_decode(
        self, codes: Tensor, scales: Tensor, block_size: int, count: int, threads: int = 1
    ) -> None:
        single = split(codes, count) if self.is_four_bit else codes
        values = quantization.decode(single, scales, block_size, self.table)
        totals = torch.linspace(-3, 3, count + 2)
        for one in self.sets:
            for adds, expected in ((False, values), (True, totals[1:-1] + values)):
                memory = totals.clone()
                found, native = memory[1:-1], self.native
                native.decode_into(found, codes, scales, block_size, adds, threads, one)
                assert same_bits(found, expected), one
                assert torch.equal(memory[[0, -1]], totals[[0, -1]])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


FOUR_BIT = [Kernel(name) for name in FOUR_BIT_TABLES]
KERNELS = [*(Kernel(name) for name in TABLES), *FOUR_BIT]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one.name)


@each_kernel
def test_the_specification_finds_the_nearest_magnitude(kernel: Kernel):
    """Compare with all distances in float64; ties are rounded down."""
    one = kernel.table
    generator = torch.Generator().manual_seed(1)
    near = [one.thresholds, torch.nextafter(one.thresholds, torch.tensor(2.0))]
    small = 10 ** (-9 * torch.rand(4000, generator=generator))
    values = torch.cat([torch.rand(4000, generator=generator), small, *near])
    codes = quantization.encode(values, torch.ones(1), len(values), one)
    distances = (values.double().unsqueeze(1) - one.magnitudes.double()).abs()
    assert torch.equal(codes.long(), distances.argmin(1))


def test_tables_and_codes_of_four_bits_by_hand():
    """The block size is 4; the first of two codes is in the lower half of a byte."""
    values = torch.tensor([1.0, -0.5, 0.0, torch.nan, torch.inf, -4.0, 2.0, -0.001, 0.3])
    codes, scales = Kernel("e3m0").specified(values, 4)
    assert codes.tolist() == [7 + 16 * (6 + 8), 0, 0 + 16 * (7 + 8), 6, 7]
    assert scales.tolist() == torch.tensor([1.0, 4.0, 0.3]).tolist()
    for name, magnitudes in MAGNITUDES.items():
        assert torch.equal(table(name).magnitudes, torch.tensor(magnitudes))


@each_kernel
def test_kernels_equal_the_specification_on_every_bin_edge(kernel: Kernel):
    for scale in cases.SCALES:
        edges = cases.bin_edges(kernel.table, scale)
        rows = edges[: len(edges) // 63 * 63].view(-1, 63)
        kernel.check(torch.cat([torch.full((len(rows), 1), scale), rows], 1).flatten())
    kernel.check(cases.bin_edges(kernel.table, 1.0), scale=1.0)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_equal_the_specification_on_16_bit_values(kernel: Kernel, dtype: torch.dtype):
    """Includes denormals, both zeros, infinities and NaNs."""
    values = cases.sixteen_bits(dtype)
    for block_size in (BLOCK, 4096):
        kernel.check(values, block_size)
    kernel.check(cases.denormals())
    for scale in (1.0, 1e-3):
        kernel.check(values, scale=scale)


@each_kernel
def test_kernels_equal_the_specification_at_any_length_and_address(kernel: Kernel):
    """Lengths around the boundaries of blocks, bytes and SIMD vectors."""
    for count in (*range(70), 127, 128, 129, 1023, 1025, 2049):
        for block_size in (BLOCK, 2, 34):
            kernel.check(cases.normal(count, count), block_size)
    for offset in range(1, 9):
        kernel.check(cases.normal(300 + offset)[offset:])
    for threads in (1, 3):
        kernel._replace(sets=("fastest",)).check(cases.normal(1_000_001), 1024, threads)


@each_kernel
@given(values=st.lists(FLOATS | st.sampled_from(EXTREME), max_size=150))
def test_kernels_equal_the_specification_on_any_values(kernel: Kernel, values: list[float]):
    kernel.check(torch.tensor(values, dtype=torch.float32))


@each_kernel
def test_all_codes_decode_and_are_added_with_two_roundings(kernel: Kernel):
    """Includes unused codes, and denormal, negative and huge scales."""
    scales = torch.tensor([0.0, 1.0, 1 / 3, -0.1, 1e-45, 1e-37, 3e38, *cases.normal(30)])
    most = 256 if kernel.is_four_bit else len(kernel.table.magnitudes)
    codes = torch.arange(most).to(torch.uint8).repeat(len(scales))
    block_size = 2 * most if kernel.is_four_bit else most
    kernel.check_decode(codes, scales, block_size, block_size * len(scales))
    if kernel.is_four_bit:
        kernel.check_decode(codes, scales, block_size, block_size * len(scales) - 1)


@pytest.mark.parametrize(
    ("kind", "magnitudes", "thresholds"),
    [
        (Codebook, [0.0], []),
        (Codebook, [0.0, 1.0], []),
        (Codebook, [0.0, 1.0, 1.0001], [0.5, 0.5]),
        (Codebook, [0.0] * 129, [1.0] * 128),
        (FourBitTable, [0.0] * 8, [0.5] * 6),
        (FourBitTable, [0.0] * 7, [0.5] * 7),
        (FourBitTable, [0.0] * 8, [0.0] * 7),
    ],
)
def test_a_table_that_cannot_be_searched_is_refused(kind, magnitudes, thresholds):
    with pytest.raises(ValueError, match=r"table|thresholds|magnitudes"):
        kind(magnitudes, thresholds)


@pytest.mark.parametrize("name", ["linear8", "e3m0"])
def test_sizes_that_do_not_fit_are_refused(name: str):
    kernel, values, scales = Kernel(name), torch.zeros(100), torch.zeros(2)
    is_four, native = kernel.is_four_bit, kernel.native
    codes = torch.zeros(50 if is_four else 100, dtype=torch.uint8)
    wrong = [(codes[1:], scales, 64), (codes, scales[1:], 64), (codes, scales, 0)]
    wrong += [(codes, torch.zeros(4), 33)] if is_four else []
    for few, sizes, block in wrong:
        with pytest.raises(ValueError, match=r"fit|even|at least"):
            native.encode_into(few, sizes, values, block, True, 1)
        with pytest.raises(ValueError, match=r"fit|even|at least"):
            native.decode_into(values, few, sizes, block, False, 1)
    with pytest.raises(ValueError, match="instruction set"):
        kernel._replace(sets=("mmx",)).check(values)


TYPES = {"half": DType.FLOAT16, "bfloat16": DType.BFLOAT16}
each_type = pytest.mark.parametrize("name", TYPES)


def check_cast(values: Tensor, name: str, sets: tuple[str, ...] = SETS, threads: int = 1) -> None:
    by_torch = values.to(getattr(torch, name))
    lost = ~by_torch.isfinite()
    expected = by_torch.masked_fill(lost, 0.0)
    for one in sets:
        memory = torch.full((2 * len(values) + 4,), AROUND, dtype=torch.uint8)
        found = memory[2:-2]
        assert cast_into(found, values, TYPES[name], threads, one) == int(lost.sum())
        assert torch.equal(found.clone().view(torch.int16), expected.view(torch.int16)), one
        assert memory[[0, 1, -2, -1]].tolist() == [AROUND] * 4


@each_type
def test_casts_equal_torch_on_every_border_between_two_numbers(name: str):
    """Values are all numbers of the type, midpoints between two numbers, and their neighbours."""
    exact = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, name))
    numbers = exact.float()
    finite = numbers[numbers.isfinite()]
    middles = (finite[:-1] + finite[1:]) / 2
    most = finite[-1:].double()
    over = (most + (most - finite[-2].double()) / 2).float()  # a tie that rounds to infinity
    for values in (numbers, middles, over, torch.tensor([3.4028235e38, 1e-45])):
        near = [values, values.nextafter(values * 0), values.nextafter(values * 0 + torch.inf)]
        for one in near:
            check_cast(torch.cat([one, -one]), name)


@each_type
def test_casts_equal_torch_at_any_length_and_address(name: str):
    for count in (*range(40), 8191, 8192, 8193, 20_000):
        check_cast(cases.normal(count + 1)[1:], name)
    check_cast(cases.denormals(), name)
    values = cases.normal(1_000_003)
    values[::1000] = torch.nan
    check_cast(values, name, ("fastest",), threads=3)  # threads add up their counts


def test_casts_that_do_not_fit_are_refused():
    values, bytes_ = torch.zeros(4), torch.zeros(9, dtype=torch.uint8)
    for wrong in (
        (bytes_, values, DType.FLOAT16, 1),
        (bytes_[1:], values, DType.FLOAT16, 1),
        (bytes_[:8], values, DType.FLOAT64, 1),
        (bytes_[:8], values, DType.FLOAT16, 1, "mmx"),
    ):
        with pytest.raises(ValueError, match=r"aligned|float16|instruction set"):
            cast_into(*wrong)
