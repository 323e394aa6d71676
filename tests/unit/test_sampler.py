"""The sampler partitions every epoch exactly among steps and ranks."""

import re
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.training.data import ShardedBatches
from refusals import refused


def epoch_of(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int = 0
) -> list[list[list[int]]]:
    """Return the batches of an epoch as [rank][step][sample]."""
    ranks = []
    for rank in range(world_size):
        batches = ShardedBatches(num_samples, batch_size, rank, world_size, seed)
        batches.set_epoch(epoch)
        ranks.append(list(batches))
    return ranks


def can_be_shared(num_samples: int, batch_size: int, world_size: int) -> bool:
    num_steps = -(-num_samples // batch_size)
    return batch_size >= world_size and num_samples // num_steps >= world_size


sizes = st.tuples(st.integers(1, 300), st.integers(1, 80), st.integers(1, 9))


@given(sizes, st.integers(0, 2**70), st.integers(0, 100))
def test_an_epoch_is_partitioned_among_steps_and_ranks(sizes, seed: int, epoch: int) -> None:
    num_samples, batch_size, world_size = sizes
    if not can_be_shared(*sizes):
        with pytest.raises(InvalidInput) as caught:
            epoch_of(*sizes, seed)
        assert caught.value.field in ("workers", "batch_size")
        return
    ranks = epoch_of(*sizes, seed, epoch)
    # Every sample is used once.
    assert sorted(chain.from_iterable(chain.from_iterable(ranks))) == list(range(num_samples))
    # All ranks have the same number of steps, of nearly equal sizes.
    num_steps = -(-num_samples // batch_size)
    assert [len(steps) for steps in ranks] == [num_steps] * world_size
    batches = ShardedBatches(num_samples, batch_size, 0, world_size, seed)
    local_sizes = [len(batch) for steps in ranks for batch in steps]
    told = [batches.size_of(rank, step) for rank in range(world_size) for step in range(num_steps)]
    assert local_sizes == told
    assert min(local_sizes) >= 1
    assert max(local_sizes) - min(local_sizes) <= 1
    step_sizes = tuple(sum(map(len, step)) for step in zip(*ranks, strict=True))
    assert (len(batches), batches.global_sizes) == (num_steps, step_sizes)
    assert max(step_sizes) <= batch_size
    assert max(step_sizes) - min(step_sizes) <= 1
    # The samples of a step do not depend on the number of workers.
    (alone,) = epoch_of(num_samples, batch_size, 1, seed, epoch)
    assert [list(chain.from_iterable(step)) for step in zip(*ranks, strict=True)] == alone


def test_another_epoch_or_seed_has_another_order() -> None:
    first = epoch_of(100, 10, 2, seed=3)
    assert first not in (epoch_of(100, 10, 2, seed=3, epoch=1), epoch_of(100, 10, 2, seed=4))
    # These pairs of seed and epoch would collide in a sum, or as consecutive 32-bit words.
    for seed in (1, 2**32):
        assert epoch_of(100, 10, 1, seed=seed) != epoch_of(100, 10, 1, seed=0, epoch=1)


def test_order_is_fixed_for_all_machines_and_versions() -> None:
    # Recorded once: ranks with different numpy versions must use the same permutation.
    assert list(ShardedBatches(10, 4, 0, 1, seed=5)) == [[3, 2, 4], [9, 6, 7], [0, 8, 5, 1]]


def test_set_epoch_during_an_epoch_applies_to_the_next_one() -> None:
    batches = ShardedBatches(20, 5, 0, 1, seed=0)
    expected, steps = list(batches), iter(batches)
    first = next(steps)
    batches.set_epoch(7)
    assert [first, *steps] == expected
    assert list(batches) != expected


@pytest.mark.parametrize(
    ("arguments", "field", "got"),
    [
        *[((10, 4, rank, 2, 0), "rank", rank) for rank in (2, -1)],
        ((10, 0, 0, 1, 0), "batch_size", 0),
        ((10, 4, 0, 0, 0), "workers", 0),
        ((10, 4, 0, 2, -1), "seed", -1),
    ],
)
def test_bad_arguments(arguments: tuple[int, int, int, int, int], field: str, got: int) -> None:
    with refused(field, got=got):
        ShardedBatches(*arguments)
    with refused("epoch", got=-1):
        ShardedBatches(10, 4, 0, 2, 0).set_epoch(-1)


def test_the_advice_for_too_small_a_batch_is_valid_and_minimal() -> None:
    too_small = [
        (num_samples, batch_size, world_size)
        for num_samples in range(1, 40)
        for world_size in range(1, min(8, num_samples) + 1)
        for batch_size in range(1, num_samples + 1)
        if not can_be_shared(num_samples, batch_size, world_size)
    ]
    assert (5, 4, 4) in too_small
    for num_samples, batch_size, world_size in too_small:
        with refused("batch_size") as caught:
            ShardedBatches(num_samples, batch_size, 0, world_size, 0)
        enough = int(re.findall(r"\d+", caught.value.problem)[0])
        (most_workers,) = map(int, re.findall(r"\d+", caught.value.hint))
        assert can_be_shared(num_samples, enough, world_size)
        assert not can_be_shared(num_samples, enough - 1, world_size)
        assert can_be_shared(num_samples, batch_size, most_workers)
        assert not can_be_shared(num_samples, batch_size, most_workers + 1)
