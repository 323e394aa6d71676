"""Windows of a sequence of tokens, plain and masked."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.data.windows import IGNORED, MaskedTokens, TokenWindows


def windows(count: int, length: int) -> TokenWindows:
    return TokenWindows(np.arange(count) % 251, length, 256, "numbers")


def masked(
    length: int = 40, seed: int = 3, count: int = 4000, vocabulary: int = 50
) -> MaskedTokens:
    tokens = np.random.default_rng(0).integers(0, vocabulary, count)
    return MaskedTokens(tokens.astype(np.uint16), length, vocabulary, "numbers", seed)


@given(st.integers(0, 60), st.integers(1, 9))
def test_windows_stand_side_by_side_and_use_each_token_once(count: int, length: int) -> None:
    samples = windows(count, length)
    inputs, targets = samples.__getitems__(range(len(samples)))
    used = len(samples) * length
    assert inputs.shape == targets.shape == (len(samples), length)
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert inputs.flatten().tolist() == samples.tokens[:used].tolist()
    assert targets.flatten().tolist() == samples.tokens[1 : used + 1].tolist()
    assert max(0, count - 1) - used < length  # another window would not fit


def test_a_batch_is_its_samples_in_the_order_asked_for() -> None:
    samples = windows(100, 7)
    inputs, targets = samples.__getitems__([5, 0, -1, 5])
    for row, index in enumerate([5, 0, 13, 5]):
        one_input, one_target = samples[index]
        assert torch.equal(inputs[row], one_input)
        assert torch.equal(targets[row], one_target)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("samples", [windows(50, 7), masked()], ids=["plain", "masked"])
def test_samples_end(samples: TokenWindows | MaskedTokens) -> None:
    with pytest.raises(IndexError):
        samples[len(samples)]
    with pytest.raises(IndexError):
        samples[-len(samples) - 1]
    inputs, _ = samples.__getitems__([])
    assert inputs.shape == (0, samples.length)


@pytest.mark.parametrize(
    "kind", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", ">u2"]
)
def test_every_kind_of_integer_becomes_int64(kind: str) -> None:
    samples = TokenWindows(np.arange(9, dtype=kind), 4, 9, "numbers")
    inputs, targets = samples.__getitems__([1])
    assert inputs.tolist() == [[4, 5, 6, 7]]
    assert targets.tolist() == [[5, 6, 7, 8]]


def test_a_batch_does_not_share_memory_with_the_sequence() -> None:
    samples = windows(20, 4)
    inputs, _ = samples.__getitems__([0])
    inputs.fill_(9)
    assert samples.tokens[:4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", [-1, 10])
def test_a_token_outside_of_the_vocabulary_is_named(wrong: int) -> None:
    tokens = np.array([1, 2, 3, 4, wrong, 5, 6, 7, 8])
    samples = TokenWindows(tokens, 2, 10, "a.npy")
    samples.__getitems__([0, 3])
    with pytest.raises(InvalidInput, match=f"a.npy has the token {wrong}, .* from 0 to 9"):
        samples.__getitems__([3, 1])


def test_masked_samples_ask_for_fifteen_per_cent_of_the_tokens() -> None:
    samples = masked()
    inputs, targets = samples.__getitems__(range(len(samples)))
    plain = torch.from_numpy(samples.tokens.astype(np.int64)).view(100, 40)
    assert inputs.shape == targets.shape == (100, 40)
    asked = targets != IGNORED
    assert asked.sum(1).tolist() == [6] * 100
    assert torch.equal(targets[asked], plain[asked])
    assert torch.equal(inputs[~asked], plain[~asked])


@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 1), (3, 1), (10, 2), (256, 38)])
def test_at_least_one_token_is_masked(length: int, count: int) -> None:
    _, targets = masked(length)[0]
    assert int((targets != IGNORED).sum()) == count


def test_masked_tokens_are_hidden_replaced_or_kept_in_the_published_shares() -> None:
    samples = masked(count=400_000)
    inputs, targets = samples.__getitems__(range(len(samples)))
    asked = targets != IGNORED
    found, wanted = inputs[asked], targets[asked]
    total = len(found)  # 60,000
    hidden, kept = found == samples.vocabulary, found == wanted
    # One random token in fifty is the right one. Three deviations are below 0.4 per cent.
    assert hidden.sum() / total == pytest.approx(0.8, abs=0.005)
    assert kept.sum() / total == pytest.approx(0.1 + 0.1 / 50, abs=0.005)
    random = found[~hidden & ~kept]
    assert random.unique().numel() == 50
    assert torch.bincount(random).min() > 0.7 * len(random) / 50
    # No place is masked more often than others.
    assert asked.float().mean(0).std() < 0.02


def test_seed_and_index_alone_decide_what_is_masked() -> None:
    samples = masked()
    inputs, targets = samples.__getitems__([7, 3, 7])
    again, asked_again = masked().__getitems__([7])
    assert torch.equal(inputs[0], inputs[2])
    assert torch.equal(inputs[0], again[0])
    assert torch.equal(targets[0], asked_again[0])
    assert torch.equal(masked()[-1][1], masked()[len(samples) - 1][1])
    other = masked(seed=4)[7][1]
    assert not torch.equal(other != IGNORED, targets[0] != IGNORED)
    assert not torch.equal(targets[0] != IGNORED, targets[1] != IGNORED)


def test_what_is_masked_stays_the_same_in_later_versions() -> None:
    """All ranks must agree, and a resumed run with the one before it."""
    inputs, targets = MaskedTokens(np.arange(80), 40, 80, "numbers", 2)[1]
    places = [7, 14, 26, 33, 35, 39]
    assert (targets != IGNORED).nonzero().flatten().tolist() == places
    assert inputs[places].tolist() == [47, 80, 80, 53, 59, 80]  # the first stays, two are random
