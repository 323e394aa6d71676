from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import BalancedSampler, Collate, ShardedBatches
from refusals import refused


def samplers(num_samples: int, batch_size: int, world_size: int, **options) -> list:
    return [
        BalancedSampler(num_samples, batch_size, rank, world_size, **options)
        for rank in range(world_size)
    ]


@st.composite
def epochs(draw: st.DrawFn) -> tuple[list[BalancedSampler], dict[int, tuple[int, ...]]]:
    """Ranks, and after which steps their shares change to what."""
    num_samples, batch_size = draw(st.integers(1, 200)), draw(st.integers(1, 50))
    world_size = draw(st.integers(1, 5))
    ranks = samplers(num_samples, batch_size, world_size, seed=draw(st.integers(0, 2**70)))
    cuts = st.lists(st.integers(0, batch_size), min_size=world_size - 1, max_size=world_size - 1)
    changes = {}
    for step in draw(st.sets(st.integers(0, len(ranks[0])))):
        ends = [0, *sorted(draw(cuts)), batch_size]
        changes[step] = tuple(b - a for a, b in pairwise(ends))
    return ranks, changes


@given(epochs())
def test_every_sample_is_used_once_however_shares_change(case) -> None:
    ranks, changes = case
    iterators = [iter(rank) for rank in ranks]
    steps = []
    for step in range(len(ranks[0])):
        if step in changes:
            for rank in ranks:
                rank.update(changes[step])
        steps.append([next(batches) for batches in iterators])
        if step in changes and sum(map(len, steps[-1])) == ranks[0].batch_size:
            assert tuple(map(len, steps[-1])) == changes[step]
    assert all(next(batches, None) is None for batches in iterators)
    used = list(chain.from_iterable(chain.from_iterable(steps)))
    assert sorted(used) == list(range(ranks[0].num_samples))
    assert [sum(map(len, step)) for step in steps] == list(ranks[0].global_sizes)


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 5), st.integers(0, 9))
def test_the_samples_of_a_step_depend_on_no_split(
    num_samples: int, batch_size: int, world_size: int, epoch: int
) -> None:
    (alone,) = samplers(num_samples, batch_size, 1)
    ranks = samplers(num_samples, batch_size, world_size)
    for rank in (alone, *ranks):
        rank.set_epoch(epoch)
    steps = zip(*ranks, strict=True)
    assert [list(chain.from_iterable(step)) for step in steps] == list(alone)
    assert all(size == batch_size for size in alone.global_sizes[:-1])


def test_a_loader_that_draws_ahead_takes_a_change_where_all_can() -> None:
    data = TensorDataset(torch.arange(40))
    ranks = samplers(40, 4, 2)
    loaders = [
        DataLoader(data, batch_sampler=ranks[0], num_workers=1, prefetch_factor=3),
        DataLoader(data, batch_sampler=ranks[1]),
    ]
    iterators = [iter(loader) for loader in loaders]
    steps = []
    for step in range(10):
        if step == 2:
            assert ranks[0].drawn > ranks[1].drawn
            first = max(rank.drawn for rank in ranks)
            for rank in ranks:
                rank.update((3, 1), first)
        steps.append([batch.tolist() for (batch,) in map(next, iterators)])
    sizes = [tuple(map(len, step)) for step in steps]
    assert sizes == [(2, 2)] * first[1] + [(3, 1)] * (10 - first[1])
    assert sorted(chain.from_iterable(chain.from_iterable(steps))) == list(range(40))


def test_a_change_between_epochs_holds_from_the_first_step_on() -> None:
    (sampler, _) = samplers(10, 4, 2)
    assert [len(batch) for batch in sampler] == [2, 2, 1]
    sampler.update((4, 0))
    assert [len(batch) for batch in sampler] == [4, 4, 2]
    sampler.update((0, 4))
    sampler.update((1, 3))  # the last word counts
    assert [len(batch) for batch in sampler] == [1, 1, 0]  # of 2, the other is 3 times as fast


def test_a_change_waits_until_it_is_due() -> None:
    (sampler, _) = samplers(20, 4, 2)
    assert next(iter(sampler))
    sampler.update((3, 1), (1, 3))
    sampler.update((4, 0), (2, 1))
    assert [len(batch) for batch in sampler] == [3, 4, 4, 4, 4]


def test_the_last_batch_goes_to_ranks_that_are_done_first() -> None:
    ranks = samplers(10, 8, 2)
    for rank in ranks:
        rank.update((7, 1))
    assert [[len(batch) for batch in rank] for rank in ranks] == [[7, 2], [1, 0]]


def test_samples_are_shuffled_as_those_of_equal_batches() -> None:
    balanced, equal = BalancedSampler(12, 4, 0, 2, seed=3), ShardedBatches(12, 4, 0, 2, seed=3)
    for sampler in (balanced, equal):
        sampler.set_epoch(5)
    assert list(balanced) == list(equal)


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


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ((0, 4, 0, 2), {}, "num_samples"),
        ((9, 0, 0, 2), {}, "batch_size"),
        ((9, 4, 0, 0), {}, "workers"),
        ((9, 4, 2, 2), {}, "rank"),
        ((9, 4, 0, 2), {"seed": -1}, "seed"),
        *(((9, 4, 0, 2), {"most": most}, "most") for most in ([4], [4, -1], [2, 1])),
    ],
)
def test_arguments_are_refused(arguments, options, field) -> None:
    with refused(field):
        BalancedSampler(*arguments, **options)


@pytest.mark.parametrize("shares", [(4,), (5, -1), (2, 1), (2, 2, 0), (3, 1)])
def test_shares_that_are_no_parts_of_a_batch_or_of_the_memory_are_refused(shares) -> None:
    sampler = BalancedSampler(9, 4, 0, 2, most=[1, None])
    assert sampler.shares == (1, 3)
    with refused("shares"):
        sampler.update(shares)


def test_what_has_been_drawn_does_not_change() -> None:
    sampler = BalancedSampler(9, 4, 0, 2)
    next(iter(sampler))
    with refused("shares"):
        sampler.update((3, 1), (1, 0))
    with refused("epoch", got=-1):
        sampler.set_epoch(-1)
