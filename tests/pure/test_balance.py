import random
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.balance import Balance


def rounds(balance: Balance, fixed: list[float], each: list[float], number: int) -> list[tuple]:
    """Record so many times what ranks take that need seconds for a step, and for each sample."""
    shares = []
    for _ in range(number):
        seconds = [
            None if share == 0 else start / share + one
            for share, start, one in zip(balance.shares, fixed, each, strict=True)
        ]
        shares.append(balance.record(seconds))
    return shares


def longest(shares: tuple[int, ...], fixed: list[float], each: list[float]) -> float:
    times = zip(shares, fixed, each, strict=True)
    return max(start + share * one for share, start, one in times if share)


@given(st.floats(1, 300), st.integers(2, 2000))
def test_a_slower_rank_gets_its_proportion_at_once(ratio: float, batch_size: int) -> None:
    balance = Balance(batch_size, 2, tolerance=0.0)
    fast, slow = rounds(balance, [0.0, 0.0], [1.0, ratio], 1)[0]
    assert fast + slow == batch_size
    assert slow <= batch_size / (1 + ratio) + 1
    assert fast <= batch_size * ratio / (1 + ratio) + 1


@given(
    st.lists(st.floats(1, 300), min_size=2, max_size=5),
    st.floats(0, 30),
    st.integers(8, 500),
)
def test_shares_always_add_up_and_the_fast_never_get_less(
    each: list[float], fixed: float, batch_size: int
) -> None:
    balance = Balance(batch_size, len(each), tolerance=0.0)
    for shares in rounds(balance, [fixed * one for one in each], each, 10):
        assert sum(shares) == batch_size
        assert min(shares) >= 0


@given(st.floats(1, 300), st.floats(0, 20))
@example(69.0, 18.25)
def test_with_fixed_costs_the_shares_come_to_rest_where_both_are_done_together(
    ratio: float, fixed: float
) -> None:
    batch_size, each = 256, [1.0, ratio]
    starts = [fixed, fixed * ratio]
    balance = Balance(batch_size, 2, tolerance=0.0)
    equal_s = longest(balance.shares, starts, each)
    # One that is too slow to help is tried again now and then, for one round.
    last_s = median(
        longest(split, starts, each) for split in rounds(balance, starts, each, 60)[-5:]
    )
    best_s = min(
        longest((batch_size - slow, slow), starts, each) for slow in range(batch_size // 2 + 1)
    )
    # What comes to rest is a whole number of samples away from the best at most.
    assert last_s <= min(equal_s, best_s + 2 * ratio + 1e-6)


def test_noise_shuffles_no_batches() -> None:
    noise = random.Random(0)
    balance = Balance(256, 3)
    rounds(balance, [0.0] * 3, [1.0, 2.0, 4.0], 1)
    before = balance.shares
    for _ in range(200):
        each = [one * noise.uniform(0.98, 1.02) for one in (1.0, 2.0, 4.0)]
        assert balance.record(each) == before
    assert balance.interval == 64


def test_a_change_of_speed_is_followed_and_looked_at_closely() -> None:
    balance = Balance(100, 2)
    for _ in range(5):
        balance.record([1.0, 1.0])
    assert (balance.shares, balance.interval) == ((50, 50), 64)
    assert balance.record([1.0, 4.0]) == (80, 20)
    assert balance.interval == 4
    assert balance.samples_per_s == (1.0, 0.25)


def test_a_rank_without_samples_is_tried_again() -> None:
    balance = Balance(10, 2)
    assert balance.record([1.0, 30.0]) == (10, 0)
    tries = 0
    while balance.record([1.0, None]) == (10, 0):
        tries += 1
        assert tries < 1000
    assert tries > 100  # it costs a few steps
    assert balance.record([1.0, 1.0]) == (5, 5)


def test_an_excluded_rank_is_not_tried_again() -> None:
    balance = Balance(10, 3)
    balance.record([1.0, 1.0, 2.0])
    assert balance.exclude(2) == (5, 5, 0)
    for _ in range(1000):
        assert balance.record([1.0, 1.0, None]) == (5, 5, 0)


def test_memory_bounds_the_first_shares_and_all_later_ones() -> None:
    balance = Balance(64, 2, most=[40, 24])
    assert balance.shares == (40, 24)
    assert balance.record([4.0, 1.0]) == (40, 24)
    assert balance.record([1.0, 9.0]) == (40, 24)


def test_a_rank_of_which_nothing_is_known_is_tried() -> None:
    balance = Balance(1, 2)
    assert balance.shares == (1, 0)
    assert balance.record([1.0, None]) == (1, 0)
    assert balance.samples_per_s == (1.0, None)
    assert Balance(4, 2).record([None, None]) == (2, 2)


@pytest.mark.parametrize("seconds", [[0.0, 1.0], [1.0, -1.0]])
def test_a_sample_takes_time(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="takes more than none"):
        Balance(4, 2).record(seconds)


def test_there_must_be_a_rank() -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        Balance(4, 0)
