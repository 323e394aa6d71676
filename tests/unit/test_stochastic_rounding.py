"""Eight-bit codes chosen by chance, so that they are right on average."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codec_cases import normal
from paceline.codecs import blockwise
from paceline.codecs.blockwise import TABLES, EightBit, table

NO_SCALE = torch.ones(1)
each_table = pytest.mark.parametrize("name", TABLES)


def encode(values: Tensor, name: str, seed: int = 0) -> Tensor:
    """Return codes of a single block whose scale is 1."""
    generator = torch.Generator().manual_seed(seed)
    return blockwise.encode_stochastic(values, NO_SCALE, len(values), table(name), generator)


@each_table
def test_each_neighbour_is_as_likely_as_the_value_is_near_to_it(name: str):
    """Count roundings upward for each tenth of the way, and compare with the expected ones.

    They are sums of independent draws of variance p (1 - p); 5 standard deviations are exceeded
    once in 1.7 million times, and the seeds are fixed.
    """
    entries = table(name).magnitudes.double()
    generator = torch.Generator().manual_seed(1)
    below = torch.randint(0, len(entries) - 1, (400_000,), generator=generator)
    low, high = entries[below], entries[below + 1]
    values = (low + (high - low) * torch.rand(len(below), generator=generator)).float()
    chance = (values.double() - low) / (high - low)
    decoded = blockwise.decode(encode(values, name), NO_SCALE, len(values), table(name))
    assert ((decoded == low) | (decoded == high)).all()
    for tenth in range(10):
        here = (10 * chance).floor().clamp(0, 9) == tenth
        surplus = (decoded == high)[here].double().sum() - chance[here].sum()
        deviation = (chance * (1 - chance))[here].sum().sqrt()
        assert abs(surplus / deviation) < 5, f"{tenth=}"


@each_table
def test_values_in_the_table_are_unchanged_and_those_above_it_become_its_largest(name: str):
    magnitudes = table(name).magnitudes
    own = torch.arange(len(magnitudes))
    for seed in range(20):
        assert torch.equal(encode(magnitudes, name, seed), own.to(torch.uint8))
        assert torch.equal(encode(-magnitudes, name, seed), (own + 128 * (own > 0)).to(torch.uint8))
    above = torch.stack([magnitudes[-1].nextafter(torch.tensor(2.0)), torch.tensor(3e38)])
    assert encode(above, name).tolist() == [len(magnitudes) - 1] * 2


@each_table
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=100),
    scale=st.floats(0, 2.0**100, width=32),
    seed=st.integers(0, 10),
)
def test_a_code_is_at_most_one_step_from_the_nearest(name, values, scale, seed):
    given_values, scales = torch.tensor(values, dtype=torch.float32), torch.tensor([scale])
    block, source = (len(values), table(name)), torch.Generator().manual_seed(seed)
    nearest = blockwise.encode(given_values, scales, *block)
    found = blockwise.encode_stochastic(given_values, scales, *block, source)
    assert ((found % 128).int() - (nearest % 128).int()).abs().max() <= 1
    assert not (found[~given_values.isfinite()]).any()
    assert torch.equal(found >= 128, (given_values < 0) & (found > 0))


def test_a_seed_decides():
    codec, found = EightBit("dynamic8", stochastic=True), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(codec.encode(normal(1000)).buffers[1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("offset", [None, 10.0])
def test_receivers_need_not_know(offset: float | None):
    values = normal(3000)
    values[7] = torch.inf
    payload = EightBit("mantissa8", offset=offset, stochastic=True).encode(values)
    decoded = EightBit("mantissa8", offset=offset).decode(payload)
    assert (decoded[:7] - values[:7]).abs().max() < 0.1 * values[:7].abs().max()
    assert (payload.num_nonfinite, decoded[7]) == (1, 0)


def test_a_block_size_beyond_the_values_takes_no_memory():
    values = torch.tensor([0.5, -1.0, 0.0])
    codec = EightBit("linear8", block_size=2**50, stochastic=True)
    assert (codec.decode(codec.encode(values)) - values).abs().max() < 1 / 127
