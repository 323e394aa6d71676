"""The samplers partition every epoch exactly among steps and ranks."""

import re
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.core.errors import InvalidInput
from paceline.training.data import BalancedSampler, Collate, ShardedBatches
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
    ("make", "field", "got"),
    [
        *((partial(ShardedBatches, 10, 4, rank, 2, 0), "rank", rank) for rank in (2, -1)),
        (partial(ShardedBatches, 10, 0, 0, 1, 0), "batch_size", 0),
        (partial(ShardedBatches, 10, 4, 0, 0, 0), "workers", 0),
        (partial(ShardedBatches, 10, 4, 0, 2, -1), "seed", -1),
        (lambda: ShardedBatches(10, 4, 0, 2, 0).set_epoch(-1), "epoch", -1),
        (partial(BalancedSampler, 0, 4, 0, 2), "num_samples", 0),
        *(
            (partial(BalancedSampler, 9, 4, 0, 2, most=most), "most", most)
            for most in ([4], [4, -1], [2, 1])
        ),
    ],
)
def test_arguments_are_refused(make, field: str, got: object) -> None:
    with refused(field, got=got):
        make()


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


def samplers(num_samples: int, batch_size: int, world_size: int, **options) -> list:
    return [
        BalancedSampler(num_samples, batch_size, rank, world_size, **options)
        for rank in range(world_size)
    ]


@st.composite
def epochs(draw: st.DrawFn) -> tuple[list[BalancedSampler], dict[int, tuple[int, ...]]]:
    """Draw the samplers of all ranks, and new shares for some of the steps."""
    num_samples, batch_size = draw(st.integers(1, 200)), draw(st.integers(1, 50))
    world_size = draw(st.integers(1, 5))
    ranks = samplers(num_samples, batch_size, world_size, seed=draw(st.integers(0, 2**70)))
    cuts = st.lists(st.integers(0, batch_size), min_size=world_size - 1, max_size=world_size - 1)
    changes = {}
    for step in draw(st.sets(st.integers(0, len(ranks[0])))):
        ends = [0, *sorted(draw(cuts)), batch_size]
        changes[step] = tuple(b - a for a, b in pairwise(ends))
    return ranks, changes


@given(epochs(), st.integers(0, 9))
def test_steps_cut_the_shuffled_samples_into_the_latest_shares(case, epoch: int) -> None:
    ranks, changes = case
    first = ranks[0]
    shuffled = ShardedBatches(first.num_samples, first.batch_size, 0, 1, first.seed)
    for sampler in (shuffled, *ranks):
        sampler.set_epoch(epoch)
    iterators = [iter(rank) for rank in ranks]
    steps = []
    for step in range(len(first)):
        if step in changes:
            for rank in ranks:
                rank.update(changes[step])
        steps.append([next(batches) for batches in iterators])
        if step in changes and sum(map(len, steps[-1])) == first.batch_size:
            assert tuple(map(len, steps[-1])) == changes[step]
    assert all(next(batches, None) is None for batches in iterators)
    used = list(chain.from_iterable(chain.from_iterable(steps)))
    assert used == list(chain.from_iterable(shuffled))
    assert [sum(map(len, step)) for step in steps] == list(first.global_sizes)
    assert all(size == first.batch_size for size in first.global_sizes[:-1])


def test_new_shares_hold_from_the_next_batch_or_from_a_position() -> None:
    (sampler, _) = samplers(10, 4, 2)
    changes = [], [((4, 0),)], [((0, 4),), ((1, 3),)]  # the last update counts
    sizes = [2, 2, 1], [4, 4, 2], [1, 1, 0]  # with (1, 3), both last samples go to rank 1
    for updates, expected in zip(changes, sizes, strict=True):
        for update in updates:
            sampler.update(*update)
        assert [len(batch) for batch in sampler] == expected
    (sampler, _) = samplers(20, 4, 2)
    batches = iter(sampler)
    assert next(batches)
    with refused("first"):  # this batch is drawn already
        sampler.update((3, 1), (1, 0))
    sampler.update((3, 1), (1, 3))
    sampler.update((4, 0), (2, 1))
    assert [len(batch) for batch in batches] == [2, 2, 3, 3]
    assert [len(batch) for batch in sampler] == [3, 4, 4, 4, 4]


def test_a_batch_of_no_samples_has_the_shapes_of_others() -> None:
    data = TensorDataset(torch.zeros(6, 1, 8, 8), torch.arange(6))
    (_, sampler) = samplers(6, 4, 2)
    sampler.update((4, 0))
    batches = list(DataLoader(data, batch_sampler=sampler, collate_fn=Collate(data)))
    assert [[tuple(part.shape) for part in batch] for batch in batches] == [
        [(0, 1, 8, 8), (0,)]
    ] * 2
    assert batches[0][1].dtype == torch.int64
    sampler.update((2, 2))
    inputs, targets = next(iter(DataLoader(data, batch_sampler=sampler, collate_fn=Collate(data))))
    assert (len(inputs), len(targets)) == (2, 2)


@pytest.mark.parametrize("shares", [(4,), (5, -1), (2, 1), (2, 2, 0), (3, 1)])
def test_shares_beyond_the_batch_or_the_bounds_are_refused(shares) -> None:
    sampler = BalancedSampler(9, 4, 0, 2, most=[1, None])
    assert sampler.shares == (1, 3)
    with refused("shares"):
        sampler.update(shares)
