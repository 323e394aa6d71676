import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.core.errors import InvalidInput
from paceline.data import ShardedBatches


def epoch_of(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int = 0
) -> list[list[list[int]]]:
    """The batches of one epoch, as [rank][step][sample]."""
    ranks = []
    for rank in range(world_size):
        batches = ShardedBatches(num_samples, batch_size, rank, world_size, seed)
        batches.set_epoch(epoch)
        ranks.append(list(batches))
    return ranks


def can_be_shared(num_samples: int, batch_size: int, world_size: int) -> bool:
    num_steps = -(-num_samples // batch_size)
    return batch_size >= world_size and num_samples // num_steps >= world_size


sizes = st.integers(1, 300)
batch_sizes = st.integers(1, 80)
world_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**70)


@settings(deadline=None)
@given(sizes, batch_sizes, world_sizes, seeds, st.integers(0, 100))
def test_an_epoch_uses_every_sample_exactly_once(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int
) -> None:
    assume(can_be_shared(num_samples, batch_size, world_size))
    ranks = epoch_of(num_samples, batch_size, world_size, seed, epoch)

    used = sorted(chain.from_iterable(chain.from_iterable(ranks)))
    assert used == list(range(num_samples))


@settings(deadline=None)
@given(sizes, batch_sizes, world_sizes, seeds)
def test_every_rank_takes_the_same_steps_of_nearly_the_same_size(
    num_samples: int, batch_size: int, world_size: int, seed: int
) -> None:
    assume(can_be_shared(num_samples, batch_size, world_size))
    ranks = epoch_of(num_samples, batch_size, world_size, seed)

    num_steps = -(-num_samples // batch_size)
    assert [len(steps) for steps in ranks] == [num_steps] * world_size
    local_sizes = [len(batch) for steps in ranks for batch in steps]
    assert min(local_sizes) >= 1
    assert max(local_sizes) - min(local_sizes) <= 1

    batches = ShardedBatches(num_samples, batch_size, 0, world_size, seed)
    assert len(batches) == num_steps
    step_sizes = tuple(sum(map(len, step)) for step in zip(*ranks, strict=True))
    assert batches.global_sizes == step_sizes
    assert max(step_sizes) <= batch_size
    assert max(step_sizes) - min(step_sizes) <= 1


@settings(deadline=None)
@given(sizes, batch_sizes, world_sizes, seeds, st.integers(0, 5))
def test_the_samples_of_a_step_do_not_depend_on_the_number_of_workers(
    num_samples: int, batch_size: int, world_size: int, seed: int, epoch: int
) -> None:
    assume(can_be_shared(num_samples, batch_size, world_size))
    ranks = epoch_of(num_samples, batch_size, world_size, seed, epoch)
    [alone] = epoch_of(num_samples, batch_size, 1, seed, epoch)

    assert [list(chain.from_iterable(step)) for step in zip(*ranks, strict=True)] == alone


@settings(deadline=None)
@given(sizes, batch_sizes, world_sizes)
def test_arguments_are_refused_only_if_a_rank_would_get_nothing(
    num_samples: int, batch_size: int, world_size: int
) -> None:
    if can_be_shared(num_samples, batch_size, world_size):
        ShardedBatches(num_samples, batch_size, 0, world_size, 0)
    else:
        with pytest.raises(InvalidInput, match="workers"):
            ShardedBatches(num_samples, batch_size, 0, world_size, 0)


def test_same_seed_same_order_and_another_epoch_or_seed_another_order() -> None:
    first, again = epoch_of(100, 10, 2, seed=3), epoch_of(100, 10, 2, seed=3)
    assert first == again
    others = [epoch_of(100, 10, 2, seed=3, epoch=1), epoch_of(100, 10, 2, seed=4)]
    assert all(first != other for other in others)
    # (seed, epoch) must not be mixed into one number: these would collide if they were added
    # or written one behind the other in 32-bit words.
    assert epoch_of(100, 10, 1, seed=1, epoch=0) != epoch_of(100, 10, 1, seed=0, epoch=1)
    assert epoch_of(100, 10, 1, seed=2**32, epoch=0) != epoch_of(100, 10, 1, seed=0, epoch=1)


def test_every_order_is_about_equally_likely() -> None:
    firsts = [0] * 4
    for epoch in range(2000):
        batches = ShardedBatches(4, 4, 0, 1, seed=0)
        batches.set_epoch(epoch)
        firsts[next(iter(batches))[0]] += 1
    assert all(abs(count - 500) < 5 * (2000 * 0.25 * 0.75) ** 0.5 for count in firsts)


def test_order_is_fixed_for_all_machines_and_versions() -> None:
    # Ranks with different numpy versions must cut the same permutation: this one was recorded once.
    assert list(ShardedBatches(10, 4, 0, 1, seed=5)) == [[3, 2, 4], [9, 6, 7], [0, 8, 5, 1]]


def test_set_epoch_during_an_epoch_takes_effect_in_the_next_one() -> None:
    batches = ShardedBatches(20, 5, 0, 1, seed=0)
    expected = list(batches)
    steps = iter(batches)
    first = next(steps)
    batches.set_epoch(7)
    assert [first, *steps] == expected
    assert list(batches) != expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (10, 1, 0, 2, 0),
            r"a batch of 1 cannot be shared by 2 workers: .*at least 2, or at most 1 worker$",
        ),
        ((3, 8, 0, 4, 0), "3 samples cannot be shared by 4 workers"),
        ((0, 8, 0, 1, 0), "0 samples cannot be shared by 1 worker:"),
        ((10, 4, 2, 2, 0), "rank must be from 0 to 1, not 2"),
        ((10, 4, -1, 2, 0), "rank must be from 0 to 1, not -1"),
        ((10, 0, 0, 1, 0), "batch size must be at least 1, not 0"),
        ((10, 4, 0, 0, 0), "number of workers must be at least 1, not 0"),
        ((10, 4, 0, 2, -1), "seed must be 0 or more, not -1"),
        ((5, 4, 0, 4, 0), r"smallest of 2 samples.*4 workers.*batch of at least 5, or at most 2"),
    ],
)
def test_bad_arguments(arguments: tuple[int, int, int, int, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ShardedBatches(*arguments)


TOO_SMALL_STEPS = [
    (num_samples, batch_size, world_size)
    for num_samples in range(1, 40)
    for world_size in range(1, min(8, num_samples) + 1)
    for batch_size in range(world_size, num_samples + 1)
    if not can_be_shared(num_samples, batch_size, world_size)
]


def test_the_advice_for_a_step_too_small_works_and_is_the_least() -> None:
    assert (5, 4, 4) in TOO_SMALL_STEPS
    for num_samples, batch_size, world_size in TOO_SMALL_STEPS:
        with pytest.raises(InvalidInput, match="too few") as error:
            ShardedBatches(num_samples, batch_size, 0, world_size, 0)
        words = str(error.value).replace(",", "").split()
        enough, most_workers = int(words[-6]), int(words[-2])

        assert can_be_shared(num_samples, enough, world_size)
        assert not can_be_shared(num_samples, enough - 1, world_size)
        assert can_be_shared(num_samples, batch_size, most_workers)
        assert not can_be_shared(num_samples, batch_size, most_workers + 1)


def test_negative_epoch() -> None:
    with pytest.raises(InvalidInput, match="epoch must be 0 or more, not -1"):
        ShardedBatches(10, 4, 0, 2, 0).set_epoch(-1)


def test_sampler_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from paceline.data import ShardedBatches"
    subprocess.run([sys.executable, "-c", code], check=True)
