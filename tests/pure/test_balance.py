"""Shares of a batch in proportion to changing speeds, and refusals of slow workers."""

import random
from itertools import product
from statistics import median
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from findings import numbers
from paceline.core.balance import Balance, apportion
from paceline.planner.admission import refused_workers

speeds = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8)


@st.composite
def bounded(draw: st.DrawFn) -> tuple[int, list[float], list[int | None]]:
    """Generate a batch size, speeds, and bounds for some workers that allow this batch."""
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
    workers = list(zip(own, parts, most, strict=True))
    assert all(bound is None or part <= bound for _, part, bound in workers)
    # A faster worker gets at least as many samples, up to its bound.
    for (fast, more, bound), (slow, less, _) in product(workers, repeat=2):
        assert fast <= slow or more >= less or more == bound


@given(st.integers(0, 7), st.lists(st.integers(1, 300), min_size=1, max_size=3))
def test_no_other_split_finishes_earlier(num_samples: int, own: list[int]) -> None:
    def done(split) -> float:
        return max(part / speed for part, speed in zip(split, own, strict=True))

    parts = apportion(num_samples, [float(speed) for speed in own])
    splits = product(range(num_samples + 1), repeat=len(own))
    assert done(parts) <= min(done(split) for split in splits if sum(split) == num_samples)


@pytest.mark.parametrize(
    ("num_samples", "own", "most", "expected"),
    [
        # The largest remainder would give the slow worker a sample, and the other would wait.
        (64, [100, 1], None, (64, 0)),
        (100, [3, 1], [50, None], (50, 50)),
        (100, [8, 1, 1], [20, 10, None], (20, 10, 70)),
        (5, [0, 1], None, (0, 5)),
        (3, [1e-300, 1e300], None, (0, 3)),
    ],
)
def test_known_splits(num_samples, own, most, expected) -> None:
    assert apportion(num_samples, own, most) == expected


@pytest.mark.parametrize(("own", "most"), [([], None), ([0, 0], None), ([1, 1], [4, 5])])
def test_impossible_bounds_and_speeds_are_refused(own, most) -> None:
    with pytest.raises(ValueError, match=r"^most\b"):
        apportion(10, own, most)


def rounds(balance: Balance, fixed: list[float], each: list[float], number: int) -> list[tuple]:
    """Record rounds of ranks with `fixed` seconds a step and `each` seconds a sample."""
    shares = []
    for _ in range(number):
        seconds = [
            None if share == 0 else start / share + one
            for share, start, one in zip(balance.shares, fixed, each, strict=True)
        ]
        shares.append(balance.record(seconds))
    return shares


@given(st.floats(1, 300), st.floats(0, 20))
@example(69.0, 18.25)
def test_with_fixed_costs_shares_converge_until_both_ranks_finish_together(ratio, fixed) -> None:
    def longest(*shares: int) -> float:
        return max(one * (fixed + share) for share, one in zip(shares, each, strict=True) if share)

    each, balance = [1.0, ratio], Balance(256, 2)
    equal_s = longest(*balance.shares)
    with patch("paceline.core.balance._TOLERANCE", 0.0):
        # A rank that is too slow to help is tried again now and then, for one round.
        last = rounds(balance, [fixed, fixed * ratio], each, 60)[-5:]
    last_s = median(longest(*split) for split in last)
    best_s = min(longest(256 - slow, slow) for slow in range(129))
    # Shares are whole samples: at most two samples of the slow rank from the best split.
    assert last_s <= min(equal_s, best_s + 2 * ratio + 1e-6)


def test_noise_does_not_change_the_shares() -> None:
    noise = random.Random(0)
    balance = Balance(256, 3)
    rounds(balance, [0.0] * 3, [1.0, 2.0, 4.0], 1)
    before = balance.shares
    for _ in range(200):
        each = [one * noise.uniform(0.98, 1.02) for one in (1.0, 2.0, 4.0)]
        assert balance.record(each) == before
    assert balance.interval == 64


def test_shares_stay_while_another_split_would_hardly_shorten_a_step() -> None:
    balance = Balance(64, 2)
    # 32 samples take 32 and 64 ms; the best split saves 21 ms.
    assert balance.record([1e-3, 2e-3], step_s=0.5) == (32, 32)
    assert balance.interval == 8
    assert balance.record([1e-3, 2e-3], step_s=0.3) == (43, 21)


def test_a_noisy_first_measurement_is_corrected_by_longer_ones() -> None:
    balance = Balance(512, 2)
    balance.record([1.0, 1.11])
    noisy = balance.shares
    found = [balance.record([1.0, 1.01]) for _ in range(5)]
    assert found[0] == noisy
    assert max(found[-1]) <= 1.01 * 257


def test_shares_do_not_oscillate_if_a_rank_with_more_samples_seems_slower() -> None:
    balance = Balance(128, 2)
    balance.shares = (72, 56)
    for _ in range(20):
        balance.record([1 + 1.2 * (share / 64 - 1) for share in balance.shares])
    assert max(balance.shares) <= 65


def test_shares_that_fixed_costs_hold_are_left_by_a_trial() -> None:
    def longest(fast: int, slow: int) -> float:
        return max(26.0 * fast, 120.0 + 74.0 * slow)

    balance = Balance(16, 2)
    balance.shares = (14, 2)  # in proportion to the times, the second rank must not get another
    rounds(balance, [0.0, 120.0], [26.0, 74.0], 8)
    assert balance.shares == min([(16 - n, n) for n in range(1, 16)], key=lambda n: longest(*n))


def test_a_trial_that_does_not_help_is_undone_and_repeated_ever_more_rarely() -> None:
    balance, tried, steps = Balance(16, 2), 0, 0
    balance.shares = (14, 2)
    while steps < 2400:
        steps += balance.interval
        # with a third sample, the second rank needs more memory than its cache has
        balance.record([26.0, 130.0 if balance.shares[1] == 2 else 200.0])
        tried += balance.shares != (14, 2)
    assert 1 <= tried <= 6
    # Another speed is a reason to try again soon.
    rounds(balance, [0.0] * 2, [26.0, 26.0], 5)
    balance.shares = (14, 2)
    rounds(balance, [0.0, 120.0], [26.0, 74.0], 12)
    assert balance.shares == (13, 3)


def test_a_rank_that_is_excluded_during_a_trial_gets_no_samples_back() -> None:
    balance = Balance(16, 2)
    balance.shares = (14, 2)
    while balance.record([26.0, 130.0]) == (14, 2):
        pass
    assert balance.exclude(1) == (16, 0)
    assert balance.record([26.0, None]) == (16, 0)


@given(bounded(), st.floats(0, 1e6))
@example((64, [1.0, 9.0], [40, 24]), 0.0)
@example((1, [1.0, 1.0, 1.0], [None] * 3), 0.0)
def test_all_rounds_assign_the_whole_batch_within_memory(case, fixed) -> None:
    num_samples, each, most = case
    balance = Balance(num_samples, len(each), most)
    for shares in rounds(balance, [fixed] * len(each), each, 12):
        assert sum(shares) == num_samples
        assert all(bound is None or own <= bound for own, bound in zip(shares, most, strict=True))


def test_a_change_of_speed_changes_the_shares_and_shortens_the_interval() -> None:
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
    assert tries > 100  # because each try costs a few steps
    assert balance.record([1.0, 1.0]) == (5, 5)
    excluding = Balance(10, 3)
    excluding.record([1.0, 1.0, 2.0])
    assert excluding.exclude(2) == (5, 5, 0)
    assert {excluding.record([1.0, 1.0, None]) for _ in range(1000)} == {(5, 5, 0)}


@pytest.mark.parametrize(
    ("num_samples", "most", "first", "seconds", "then"),
    [
        (64, [40, 24], (40, 24), [4.0, 1.0], (40, 24)),  # memory limits the first shares
        (64, [40, 24], (40, 24), [1.0, 9.0], (40, 24)),  # and all later shares
        (1, None, (1, 0), [1.0, None], (1, 0)),  # the second rank is not measured yet
        (4, None, (2, 2), [None, None], (2, 2)),
    ],
)
def test_shares_before_and_after_a_round(num_samples, most, first, seconds, then) -> None:
    balance = Balance(num_samples, 2, most=most)
    assert (balance.shares, balance.record(seconds)) == (first, then)


def test_a_slower_worker_is_admitted_if_it_gains_two_percent() -> None:
    assert refused_workers([100.0, 25.0], 100) == {}
    # A worker that is too slow for a single sample gains nothing.
    ((worker, why),) = refused_workers([0.5, 100.0, 90.0], 64).items()
    assert (worker, numbers(why)[:2]) == (0, [0, 0.5])
    ((worker, why),) = refused_workers([100.0, 0.5], 64).items()
    assert (worker, numbers(why)) == (1, [1, 0.5, 100, 100])


def test_a_slow_worker_is_admitted_if_the_others_lack_memory_for_the_batch() -> None:
    assert refused_workers([100.0, 1.0], 100, most=[60, None]) == {}
    assert list(refused_workers([100.0, 1.0], 100)) == [1]


@given(st.lists(st.floats(0.5, 200), min_size=1, max_size=6), st.integers(1, 300))
def test_admitted_workers_nearly_reach_the_best_rate(speeds: list[float], batch_size: int) -> None:
    refused = refused_workers(speeds, batch_size)
    admitted = [speed for rank, speed in enumerate(speeds) if rank not in refused]
    assert admitted
    assert min(admitted) >= max((speeds[rank] for rank in refused), default=0)

    def rate(own: list[float]) -> float:
        parts = apportion(batch_size, own)
        return batch_size / max(part / one for part, one in zip(parts, own, strict=True))

    assert rate(admitted) * 1.02 >= rate(speeds)
