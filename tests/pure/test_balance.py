"""Shares of a batch by the changing speeds of workers, and workers too slow to help."""

import random
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from findings import numbers
from paceline.core.balance import Balance, apportion
from paceline.core.plan import Kind, PriceKey
from paceline.planner import Forecast
from paceline.planner.admission import admit, admit_profiled

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
    workers = list(zip(own, parts, most, strict=True))
    assert all(bound is None or part <= bound for _, part, bound in workers)
    # A faster worker gets no less, unless it has all that it may.
    for (fast, more, bound), (slow, less, _) in product(workers, repeat=2):
        assert fast <= slow or more >= less or more == bound


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
        (10, [1, 1, 1], None, (4, 3, 3)),
        # Largest remainders would give the slow one a sample, and the others would wait for it.
        (64, [100, 1], None, (64, 0)),
        (100, [3, 1], [50, None], (50, 50)),
        (100, [8, 1, 1], [20, 10, None], (20, 10, 70)),
        (5, [0, 1], None, (0, 5)),
        (3, [1e-300, 1e300], None, (0, 3)),
    ],
)
def test_splits_that_are_known(num_samples, own, most, expected) -> None:
    assert apportion(num_samples, own, most) == expected


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        *[(lambda own=own: apportion(10, own), "most") for own in ([], [0, 0])],
        (lambda: apportion(10, [1, 1], [4, 5]), "most"),
        *[(lambda own=own: admit(own, 10), "speeds") for own in ([], [1.0, 0.0])],
        (lambda: admit([1.0], 10, exchange_s=-1.0), "speeds"),
        (lambda: admit([1.0, 1.0], 10, most=[3, 3]), "most"),
    ],
)
def test_what_makes_no_sense_is_refused(ask, field) -> None:
    with pytest.raises(ValueError, match=rf"^{field}\b"):
        ask()


def rounds(balance: Balance, fixed: list[float], each: list[float], number: int) -> list[tuple]:
    """Record the times of ranks with fixed seconds per step and per sample."""
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


def test_a_noisy_first_measurement_is_corrected_by_longer_ones() -> None:
    balance = Balance(512, 2)
    balance.record([1.0, 1.11])
    noisy = balance.shares
    found = [balance.record([1.0, 1.01]) for _ in range(5)]
    assert found[0] == noisy
    assert found[-1] == (257, 255)


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


@pytest.mark.parametrize(
    ("num_samples", "most", "first", "seconds", "then"),
    [
        (64, [40, 24], (40, 24), [4.0, 1.0], (40, 24)),  # memory bounds the first shares
        (64, [40, 24], (40, 24), [1.0, 9.0], (40, 24)),  # and all later ones
        (1, None, (1, 0), [1.0, None], (1, 0)),  # nothing is known of a rank: it is tried
        (4, None, (2, 2), [None, None], (2, 2)),
    ],
)
def test_shares_before_and_after_a_round(num_samples, most, first, seconds, then) -> None:
    balance = Balance(num_samples, 2, most=most)
    assert (balance.shares, balance.record(seconds)) == (first, then)


def helps(*arguments, **options) -> list[bool]:
    return [one.helps for one in admit(*arguments, **options)]


def test_four_to_one_in_equal_batches_is_refused_and_in_balanced_ones_is_not() -> None:
    fast, slow = admit([100.0, 25.0], 100, balanced=False)
    assert (fast.helps, slow.helps) == (True, False)
    # Equal: 50 samples at 25 a second take 2 s. Balanced: 80 and 20 take 0.8 s. Alone: 1 s.
    assert numbers(slow.why) == [1, 25, 50, 125, 100]
    assert numbers(admit([100.0, 25.0], 100)[1].why) == [1, 25, 125, 50, 100]
    assert helps([100.0, 25.0], 100) == [True, True]
    # Neither does the order of the ranks matter.
    assert helps([1.0, 100.0, 90.0], 128, balanced=False) == [False, True, True]


def test_whom_the_exchange_costs_more_than_it_gains_is_refused() -> None:
    # Alone 1 s; together 0.8 s and the exchange.
    assert helps([100.0, 25.0], 100, exchange_s=0.1) == [True, True]
    slower = admit([100.0, 25.0], 100, exchange_s=0.3)[1]
    assert not slower.helps
    assert slower.balanced_samples_per_s == pytest.approx(100 / 1.1)
    # One for whom a batch has no sample gains nothing.
    idle = admit([100.0, 0.5], 64)[1]
    assert not idle.helps
    assert idle.balanced_samples_per_s == idle.without_samples_per_s == pytest.approx(100)
    verdicts = [one.why.partition(") ")[2].partition(":")[0] for one in (slower, idle)]
    assert verdicts[0] != verdicts[1]
    # Many may be worth an exchange that two are not: alone 1 s, two 0.5 + 0.6 s, four 0.25 + 0.6 s.
    assert helps([100.0] * 2, 100, exchange_s=0.6) == [True, False]
    assert all(helps([100.0] * 4, 100, exchange_s=0.6))


def test_a_worker_is_needed_where_the_batch_fits_into_no_other() -> None:
    verdicts = admit([100.0, 1.0], 100, balanced=False, most=[60, None])
    assert all(one.helps for one in verdicts)
    assert verdicts[1].without_samples_per_s == 0


@given(st.lists(st.floats(0.5, 200), min_size=1, max_size=6), st.integers(1, 300))
def test_those_who_are_admitted_reach_nearly_the_most(speeds: list[float], batch_size: int) -> None:
    verdicts = admit(speeds, batch_size)
    best = max(one.balanced_samples_per_s for one in verdicts)
    admitted = [one for one in verdicts if one.helps]
    assert admitted
    assert all(one.balanced_samples_per_s * 1.02 >= best for one in admitted)
    assert min(one.samples_per_s for one in admitted) >= max(
        (one.samples_per_s for one in verdicts if not one.helps), default=0
    )


def test_a_profile_says_what_each_device_computes_and_what_the_exchange_takes() -> None:
    # With 50 samples each: 0.5 s and 2 s, and updates of 0.1 and 0.2 s. A step takes 2.4 s, and
    # so the exchange 0.2 s.
    fast = {Kind.FORWARD: 0.2, Kind.BACKWARD: 0.3, Kind.STEP: 0.1}
    slow = {Kind.FORWARD: 0.5, Kind.BACKWARD: 1.5, Kind.STEP: 0.2}
    named = ("fast", fast), ("slow", slow), ("another", {Kind.FORWARD: 7.0})
    durations = {PriceKey(name, kind, "a"): s for name, own in named for kind, s in own.items()}
    forecast = cast("Forecast", SimpleNamespace(devices=("fast", "slow"), step_s=2.4))
    fast, slow = admit_profiled(forecast, durations, 50, 100)
    assert (fast.samples_per_s, slow.samples_per_s) == pytest.approx((100, 25))
    # 80 and 20 samples take 0.8 s, the slow update 0.2 s; alone the fast one takes 1 and 0.1 s.
    assert slow.balanced_samples_per_s == pytest.approx(100 / 1.2)
    assert slow.without_samples_per_s == pytest.approx(100 / 1.1)
    assert [fast.helps, slow.helps] == [True, False]
