"""The C++ kernels of quantization and casts return the same bits as their specifications.

The module `quantization` specifies codes, and is checked by a naive search. Torch specifies casts.
"""

import pytest
import torch
from torch import Tensor

import codec_cases as cases
from kernel_contract import KernelContract, each_name, same_bits
from paceline.codecs import quantization
from paceline.codecs.quantization import (
    FOUR_BIT_TABLES,
    EncodedBlocks,
    QuantizationTable,
    join,
    table,
)
from paceline.native import Codebook, DType, FourBitTable, cast_into, instruction_sets

SETS = instruction_sets()
AROUND = 77
# By hand: powers of 2; and the centres of 4, 2 and 1 equal parts of (0.1, 1), over 1, 10 and 100.
MAGNITUDES = {
    "e3m0": [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1],
    "dynamic4": [0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875],
}


class TestNative(KernelContract):
    """The C++ kernels, on all instruction sets of this processor."""

    block_sizes = (64, 4096)
    most = 20_001
    sets, threads = SETS, 1

    def encode(self, values, scales, block_size, one: QuantizationTable):
        found = []
        for instructions in self.sets:
            memory = torch.full((-(-len(values) * one.num_bits // 8) + 2,), AROUND).byte()
            own = torch.full((-(-len(values) // block_size),), -1.0) if scales is None else scales
            how = scales is None, self.threads, instructions
            num_lost = one.lookup.encode_into(memory[1:-1], own, values, block_size, *how)
            assert memory[[0, -1]].tolist() == [AROUND] * 2  # untouched
            found.append((memory[1:-1], own, num_lost))
        first, *others = found
        for codes, own, num_lost in others:
            assert torch.equal(codes, first[0])
            assert (same_bits(own, first[1]), num_lost) == (True, first[2])
        return first

    def decode(self, values, encoded: EncodedBlocks, adds):
        before, found = values.clone(), []
        codes, scales, block_size, one = encoded
        for instructions in self.sets:
            how = adds, self.threads, instructions
            one.lookup.decode_into(values.copy_(before), codes, scales, block_size, *how)
            found.append(values.clone())
        assert all(same_bits(values, other) for other in found)

    @each_name
    def test_every_tail_and_alignment(self, name: str):
        """Lengths around the boundaries of blocks, bytes and SIMD vectors."""
        for count in (*range(70), 127, 128, 129, 2049):
            for block_size in (64, 2, 34):
                self.check(cases.normal(count, count), name, block_size)
        for at in range(1, 9):
            self.check(cases.normal(300), name, 64, at)

    @each_name
    def test_several_threads(self, name: str):
        self.sets = ("fastest",)
        for threads in (1, 3):
            self.threads = threads
            self.check(cases.normal(1_000_001), name, 1024)


@each_name
def test_the_specification_finds_the_nearest_magnitude(name: str):
    """Compare with all distances in float64; ties are rounded down."""
    one = table(name)
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
    scales = quantization.scales_of(values, 4)
    codes = join(quantization.encode(values, scales, 4, table("e3m0")))
    assert codes.tolist() == [7 + 16 * (6 + 8), 0, 0 + 16 * (7 + 8), 6, 7]
    assert scales.tolist() == torch.tensor([1.0, 4.0, 0.3]).tolist()
    for name, magnitudes in MAGNITUDES.items():
        assert torch.equal(table(name).magnitudes, torch.tensor(magnitudes))


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
    native, values, scales = table(name).lookup, torch.zeros(100), torch.zeros(2)
    is_four = name in FOUR_BIT_TABLES
    codes = torch.zeros(50 if is_four else 100, dtype=torch.uint8)
    wrong = [(codes[1:], scales, 64), (codes, scales[1:], 64), (codes, scales, 0)]
    wrong += [(codes, torch.zeros(4), 33)] if is_four else []
    for few, sizes, block in wrong:
        with pytest.raises(ValueError, match=r"size|even|at least"):
            native.encode_into(few, sizes, values, block, True, 1)
        with pytest.raises(ValueError, match=r"size|even|at least"):
            native.decode_into(values, few, sizes, block, False, 1)
    with pytest.raises(ValueError, match="instruction set"):
        native.encode_into(codes, scales, values, 64, True, 1, "mmx")


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
