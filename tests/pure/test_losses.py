"""Time losses of real steps: slowdown by exchanges, the slowest worker, forecasts."""

import pytest

from boxes import box, chain, link
from findings import numbers
from paceline.core.compare import Breakdown
from paceline.core.losses import (
    BETWEEN_HOSTS,
    CORES_BETWEEN_HOSTS,
    WITHIN_A_HOST,
    Losses,
    largest_of,
)
from paceline.core.machine import Machine
from paceline.planner import Forecast, forecast
from paceline.planner.forecast import half_width
from paceline.records.catalogue import EqualDevices
from paceline.strategies import STRATEGIES


def losing(machine: Machine, **shares: float) -> Machine:
    losses = Losses(**{"beside_exchange": 0.0, "spread": 0.0} | shares, source="a test")
    return machine.model_copy(update={"losses": losses})


def forecast_of(machine: Machine, strategy: str, *layers, workers: int = 2, **config) -> Forecast:
    known = STRATEGIES[strategy]
    config = known.config(workers=workers, **config)
    return forecast(chain(*layers), machine, known, config, workers)


LONG = ((1000.0, 4), (1000.0, 8_000_000))  # the exchange overlaps half of backward


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (8, 1.4236), (64, 2.3437)]
)
def test_the_expected_maximum_matches_published_tables(count: int, expected: float) -> None:
    # Published expectations of the largest order statistic of standard normal numbers.
    assert largest_of(count) == pytest.approx(expected, abs=0.03)
    # The spread of the mean of n steps is smaller by the root of n.
    spread = Losses(beside_exchange=0.0, spread=0.1, source="a test")
    slowdowns = [spread.slowdown(0.0, count, steps) for steps in (1, 100)]
    assert slowdowns == pytest.approx([1 + largest_of(count) * each for each in (0.1, 0.01)])


def test_cpu_workers_on_two_hosts_slow_down_beside_their_exchange_as_measured() -> None:
    """The exchange of 8 MB takes 1,000 s, half of backward."""
    for hosts, usual in ((1, WITHIN_A_HOST), (2, BETWEEN_HOSTS)):
        gpus = EqualDevices(device="v100", devices=4, hosts=hosts, network="25gbe").machine("some")
        assert gpus.for_workers(4 * hosts).usual_losses == usual
    joined = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 8e3)])
    machine = joined.model_copy(update={"losses": None})
    assert machine.usual_losses == CORES_BETWEEN_HOSTS
    found = forecast_of(machine, "allreduce", *LONG)  # the update takes only 8 ms
    expected = 1 + 0.55 * 0.5 + 0.03 * largest_of(2)
    assert found.slowdown == pytest.approx(expected, rel=1e-5)
    assert found.step_s == pytest.approx(2000.0 * expected, rel=1e-5)


@pytest.mark.parametrize(
    ("beside_copies", "expected"), [(0.2, 1 + 0.2 * 500 / 2000), (None, 1 + 0.9 * 500 / 2000)]
)
def test_copies_to_and_from_the_host_slow_a_gpu_less_than_sums(beside_copies, expected):
    """Each copy takes 250 s of the remaining 1,000 s of backward; the sum takes 200 s."""
    slow = {"memory_bandwidth_bytes_per_s": 3 * 8e6 / 200}
    links = [link("gpu0", "h", 32e3), link("gpu1", "h", 32e3)]
    shares = {"beside_exchange": 0.9, "beside_copies": beside_copies}
    gpus = losing(box("gpu", "gpu", links=links, host=slow), **shares)
    found = forecast_of(gpus, "host", *LONG, chunk=1)
    assert found.slowdown == pytest.approx(expected, rel=1e-4)
    # CPU workers use the same cores for sums and computation.
    cores = losing(box("cpu", "cpu", host=slow), beside_exchange=0.9, beside_copies=0.0)
    assert forecast_of(cores, "host", *LONG, chunk=1).slowdown > 1 + 0.9 * 190 / 2000


@pytest.mark.parametrize(
    ("unrest", "exposed_s", "expected"),
    [
        *[(0.0, 0.0, 0.13), (0.05, 0.0, 0.13), (0.25, 0.0, 0.33), (0.0, 0.5, 0.195)],
        (9.0, 0.0, 9.08),
        # Without a profile the range grows with the exchange: 0.07 + 2.5 * (0.2 - 0.02).
        *[(None, 0.0, 0.07), (None, 0.01, 0.07), (None, 0.2, 0.52), (None, 0.7, 0.7)],
    ],
)
def test_a_restless_profile_and_an_exchange_widen_the_range(unrest, exposed_s, expected):
    known = None if unrest is None else Losses.none("a test", unrest)
    machine = EqualDevices(device="v100", devices=2).machine("two", known)
    parts = Breakdown(0.0, 0.3, 0.7 - exposed_s, 0.0, 0.0, 0.0, exposed_s, 0.0)
    assert half_width(machine, parts) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("shares", "percent", "causes"),
    [
        # 4 s of exchange during 8 s of backward; waiting costs 0.59 standard deviations.
        ({"beside_exchange": 0.5, "spread": 0.1}, 31, 2),
        ({"beside_exchange": 0.5}, 25, 1),
        ({"spread": 0.1}, 6, 1),
        ({}, 0, 0),
    ],
)
def test_a_forecast_names_only_the_actual_causes_of_a_slowdown(shares, percent, causes):
    machine = losing(box("cpu", "cpu", links=[link("h", "h", 1e6)]), **shares)
    found = forecast_of(machine, "allreduce", (4.0, 2_000_000), (4.0, 2_000_000))
    assert found.slowdown == pytest.approx(1 + percent / 100, abs=0.005)
    assert len(found.slowed_by) == causes
    # 4 of the 8 s of exchange follow after backward.
    exposed = round(100 * 4 / found.step_s)
    slower = [percent] if percent else []
    assert numbers(found.why) == [100 - exposed, *slower, exposed, 8]
    # A single worker neither exchanges nor waits.
    alone = forecast_of(losing(box("cpu"), **shares), "allreduce", (4.0, 4), workers=1)
    assert (alone.slowdown, numbers(alone.why)) == (1.0, [100])


def test_asynchronous_workers_do_not_wait_for_each_other() -> None:
    slow = box("gpu", "gpu", links=[link("gpu0", "h", 1e6), link("gpu1", "h", 1e6)])
    # Their exchange overlaps all computation; allreduce with one layer overlaps nothing.
    both = losing(slow, beside_exchange=0.5, spread=0.1)
    waited, hidden = (
        forecast_of(both, name, (1.0, 2_000_000)) for name in ("allreduce", "hogbatch")
    )
    assert (waited.slowdown, hidden.slowdown) == pytest.approx((1.06, 1.5), abs=0.005)
    assert len(waited.slowed_by) == len(hidden.slowed_by) == 1
    assert waited.slowed_by != hidden.slowed_by
