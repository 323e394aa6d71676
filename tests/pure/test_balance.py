"""Shares of a batch by the speeds of workers, at once and as they change."""

import random
from itertools import product
from statistics import median

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.balance import Balance, apportion

speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8)


@st.composite
def bounded(draw: st.DrawFn) -> tuple[int, list[float], list[int | None]]:
    """A batch that fits, with bounds on some workers."""
    own = draw(speeds)
    bound = st.one_of(st.none(), st.integers(0, 60))
    most = draw(st.lists(bound, min_size=len(own), max_size=len(own)))
    room = sum(500 if one is None else one for one in most)
    return draw(st.integers(0, min(room, 500))), own, most


@given(bounded())
def test_parts_sum_to_the_batch_and_stay_within_bounds(case) -> None:
    num_samples, own, most = case
    parts = apportion(num_samples, own, most)
    assert sum(parts) == num_samples
    assert min(parts) >= 0
    assert all(bound is None or part <= bound for part, bound in zip(parts, most, strict=True))


@given(st.integers(0, 500), speeds)
def test_a_faster_worker_never_gets_less(num_samples: int, own: list[float]) -> None:
    parts = apportion(num_samples, own)
    for (fast, more), (slow, less) in product(zip(own, parts, strict=True), repeat=2):
        assert fast <= slow or more >= less


@given(st.integers(0, 7), st.lists(st.integers(1, 300), min_size=1, max_size=3))
def test_no_other_split_is_done_earlier(num_samples: int, own: list[int]) -> None:
    def done(split) -> float:
        return max(part / speed for part, speed in zip(split, own, strict=True))

    parts = apportion(num_samples, [float(speed) for speed in own])
    splits = product(range(num_samples + 1), repeat=len(own))
    assert done(parts) <= min(done(split) for split in splits if sum(split) == num_samples)


@pytest.mark.parametrize(
    ("num_samples", "own", "most", "expected"),
    [
        (100, [4, 1], None, (80, 20)),
        (10, [1, 1, 1], None, (4, 3, 3)),
        # Largest remainders would give the slow one a sample, and the others would wait for it.
        (64, [100, 1], None, (64, 0)),
        (100, [3, 1], [50, None], (50, 50)),
        (100, [8, 1, 1], [20, 10, None], (20, 10, 70)),
        (5, [0, 1], None, (0, 5)),
        (0, [1, 2], None, (0, 0)),
        (3, [1e-300, 1e300], None, (0, 3)),
    ],
)
def test_splits_that_are_known(num_samples, own, most, expected) -> None:
    assert apportion(num_samples, own, most) == expected


@pytest.mark.parametrize(
    ("own", "most", "field"),
    [
        ([1, -1], None, "speeds"),
        ([1, float("nan")], None, "speeds"),
        ([1, float("inf")], None, "speeds"),
        ([], None, "most"),
        ([0, 0], None, "most"),
        ([1, 1], [4, 5], "most"),
    ],
)
def test_what_cannot_be_split(own, most, field) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        apportion(10, own, most)


def rounds(balance: Balance, fixed: list[float], each: list[float], number: int) -> list[tuple]:
    """Record what ranks take that need these seconds for a step, and for each sample."""
    shares = []
    for _ in range(number):
        seconds = [
            None if share == 0 else start / share + one
            for share, start, one in zip(balance.shares, fixed, each, strict=True)
        ]
        shares.append(balance.record(seconds))
    return shares


@given(st.floats(1, 300), st.integers(2, 2000))
def test_a_slower_rank_gets_its_proportion_at_once(ratio: float, batch_size: int) -> None:
    balance = Balance(batch_size, 2, tolerance=0.0)
    ((fast, slow),) = rounds(balance, [0.0, 0.0], [1.0, ratio], 1)
    assert fast + slow == batch_size
    assert slow <= batch_size / (1 + ratio) + 1
    assert fast <= batch_size * ratio / (1 + ratio) + 1


@given(st.lists(st.floats(1, 300), min_size=2, max_size=5), st.floats(0, 30), st.integers(8, 500))
def test_shares_always_add_up(each: list[float], fixed: float, batch_size: int) -> None:
    balance = Balance(batch_size, len(each), tolerance=0.0)
    for shares in rounds(balance, [fixed * one for one in each], each, 10):
        assert sum(shares) == batch_size
        assert min(shares) >= 0


@given(st.floats(1, 300), st.floats(0, 20))
@example(69.0, 18.25)
def test_with_fixed_costs_shares_come_to_rest_where_both_are_done_together(ratio, fixed) -> None:
    def longest(*shares: int) -> float:
        return max(one * (fixed + share) for share, one in zip(shares, each, strict=True) if share)

    each, balance = [1.0, ratio], Balance(256, 2, tolerance=0.0)
    equal_s = longest(*balance.shares)
    # One that is too slow to help is tried again now and then, for one round.
    last = rounds(balance, [fixed, fixed * ratio], each, 60)[-5:]
    last_s = median(longest(*split) for split in last)
    best_s = min(longest(256 - slow, slow) for slow in range(129))
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


def test_a_rank_without_samples_is_tried_again_unless_it_is_excluded() -> None:
    balance = Balance(10, 2)
    assert balance.record([1.0, 30.0]) == (10, 0)
    tries = 0
    while balance.record([1.0, None]) == (10, 0):
        tries += 1
        assert tries < 1000
    assert tries > 100  # it costs a few steps
    assert balance.record([1.0, 1.0]) == (5, 5)
    excluding = Balance(10, 3)
    excluding.record([1.0, 1.0, 2.0])
    assert excluding.exclude(2) == (5, 5, 0)
    assert {excluding.record([1.0, 1.0, None]) for _ in range(1000)} == {(5, 5, 0)}


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


def test_there_is_a_rank_and_a_sample_takes_time() -> None:
    for seconds in ([0.0, 1.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match=r"^seconds: "):
            Balance(4, 2).record(seconds)
    with pytest.raises(ValueError, match=r"^num_ranks: "):
        Balance(4, 0)
