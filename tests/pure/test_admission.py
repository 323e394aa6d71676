"""Who may join a training in step: by what all reach with a worker, and without."""

from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from findings import numbers
from paceline.core.plan import Kind, PriceKey
from paceline.planner import Forecast
from paceline.planner.admission import admit, admit_profiled, admit_rounds


def helps(*arguments, **options) -> list[bool]:
    return [one.helps for one in admit(*arguments, **options)]


def test_four_to_one_in_equal_batches_is_refused_and_in_balanced_ones_is_not() -> None:
    fast, slow = admit([100.0, 25.0], 100, balanced=False)
    assert (fast.helps, slow.helps) == (True, False)
    # Equal: 50 samples at 25 a second take 2 s. Balanced: 80 and 20 take 0.8 s. Alone: 1 s.
    found = slow.equal_samples_per_s, slow.balanced_samples_per_s, slow.without_samples_per_s
    assert found == pytest.approx((50, 125, 100))
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
    verdicts = [one.why.partition("samples/s, ")[2].partition(":")[0] for one in (slower, idle)]
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


@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        ([], {}),
        ([1.0, 0.0], {}),
        ([1.0], {"exchange_s": -1.0}),
        ([1.0, 1.0], {"most": [3, 3]}),
    ],
)
def test_what_makes_no_sense(speeds, options) -> None:
    with pytest.raises(ValueError, match=r"^(speeds and exchange_s|most): "):
        admit(speeds, 10, **options)


def test_a_profile_says_what_each_device_computes_and_what_the_exchange_takes() -> None:
    # With 50 samples each: 0.5 s and 2 s. A step takes 2.3 s, and so the exchange 0.3 s.
    durations = {
        PriceKey("fast", Kind.FORWARD, "a"): 0.2,
        PriceKey("fast", Kind.BACKWARD, "a"): 0.3,
        PriceKey("fast", Kind.STEP, ""): 9.0,
        PriceKey("slow", Kind.FORWARD, "a"): 0.5,
        PriceKey("slow", Kind.BACKWARD, "a"): 1.5,
        PriceKey("another", Kind.FORWARD, "a"): 7.0,
    }
    forecast = cast("Forecast", SimpleNamespace(devices=("fast", "slow"), step_s=2.3))
    fast, slow = admit_profiled(forecast, durations, 50, 100)
    assert (fast.samples_per_s, slow.samples_per_s) == pytest.approx((100, 25))
    assert slow.balanced_samples_per_s == pytest.approx(100 / 1.1)
    assert [fast.helps, slow.helps] == [True, False]


@pytest.mark.parametrize(("round_s", "helps"), [(8.0, True), (9.0, True), (10.0, False)])
def test_workers_that_exchange_once_a_round_are_judged_by_whole_rounds(round_s, helps) -> None:
    # 1000 samples take both together 8 s, and the fast one by itself 10 s.
    forecast = cast("Forecast", SimpleNamespace(samples_per_s=1000 / round_s))
    fast, slow = admit_rounds(forecast, [100.0, 25.0], 1000)
    assert slow.balanced_samples_per_s == pytest.approx(1000 / round_s)
    assert slow.without_samples_per_s == pytest.approx(100)
    assert [fast.helps, slow.helps] == [True, helps]
