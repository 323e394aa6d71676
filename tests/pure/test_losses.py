"""Losses of real steps: their shares, the wait for the slowest, and forecasts with them."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, chain, link
from paceline.core.compare import Breakdown
from paceline.core.losses import (
    BETWEEN_HOSTS,
    CORES_BETWEEN_HOSTS,
    WITHIN_A_HOST,
    Losses,
    largest_of,
)
from paceline.core.machine import Machine
from paceline.planner import forecast
from paceline.planner.ranges import half_width
from paceline.records.catalogue import EqualDevices
from paceline.strategies import STRATEGIES


def losses(**shares: float) -> Losses:
    return Losses(**{"beside_exchange": 0.0, "spread": 0.0, **shares}, source="a test")


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 0.5642), (4, 1.0294), (8, 1.4236), (64, 2.3437)]
)
def test_the_largest_of_normal_numbers_is_that_of_the_tables(count: int, expected: float) -> None:
    # Expected values of the largest order statistic of the standard normal distribution.
    assert largest_of(count) == pytest.approx(expected, abs=0.03)


@given(
    st.floats(0, 1), st.integers(1, 4096), st.floats(0, 0.9), st.floats(0, 0.5), st.integers(1, 500)
)
def test_a_slowdown_grows_with_what_is_hidden_and_with_workers(
    hidden: float, workers: int, beside: float, spread: float, steps: int
) -> None:
    known = losses(beside_exchange=beside, spread=spread)
    found = known.slowdown(hidden, workers, steps)
    assert found >= 1.0
    assert known.slowdown(hidden, workers + 1, steps) >= found - 1e-12
    assert known.slowdown(hidden, workers, steps + 1) <= found + 1e-12


def test_a_worker_alone_loses_nothing() -> None:
    assert WITHIN_A_HOST.slowdown(0.0, 1) == 1.0


def test_the_spread_of_many_steps_is_less_by_the_root_of_their_number() -> None:
    one, hundred = (losses(spread=0.1).slowdown(0.0, 8, steps) for steps in (1, 100))
    assert (one - 1) / (hundred - 1) == pytest.approx(10.0)


def test_links_reach_their_share_and_that_once() -> None:
    machine = EqualDevices(device="v100", devices=2).machine("two")
    own = machine.links[0]
    assert own.share < 1
    found = machine.reached
    reached = found.links[0].bandwidth_bytes_per_s
    assert reached == pytest.approx(own.share * own.bandwidth_bytes_per_s)
    assert found.reached.links == found.links


def test_several_hosts_lose_less_beside_an_exchange() -> None:
    def usual(hosts: int) -> Losses:
        equal = EqualDevices(device="v100", devices=4, hosts=hosts, network="25gbe")
        machine: Machine = equal.machine("some").for_workers(4 * hosts)
        return machine.usual_losses

    assert usual(1) == WITHIN_A_HOST
    assert usual(2) == BETWEEN_HOSTS
    assert statistics.mean((usual(2).beside_exchange, 0)) < usual(1).beside_exchange


def test_cores_between_hosts_lose_as_much_as_was_measured_beside_their_exchange() -> None:
    """The 8 MB of the layer that backward begins with take 1,000 s, beside half of backward."""
    joined = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 8e3)])
    machine = joined.model_copy(update={"losses": None})
    assert machine.usual_losses == CORES_BETWEEN_HOSTS
    # Long beside the update, which takes 8 ms.
    work, strategy = chain((1000.0, 4), (1000.0, 8_000_000)), STRATEGIES["allreduce"]
    found = forecast(work, machine, strategy, strategy.config(workers=2), 2)
    expected = 1 + 0.55 * 0.5 + 0.03 * largest_of(2)
    assert found.slowdown == pytest.approx(expected, rel=1e-5)
    assert found.step_s == pytest.approx(2000.0 * expected, rel=1e-5)


@pytest.mark.parametrize(
    ("beside_copies", "expected"), [(0.2, 1 + 0.2 * 500 / 2000), (None, 1 + 0.9 * 500 / 2000)]
)
def test_copies_to_and_from_the_host_take_less_from_a_gpu_than_its_own_sums(
    beside_copies: float | None, expected: float
) -> None:
    """Each way takes 250 s of the 1,000 s of backward that are left; the host's sum takes 200."""
    links = [link("gpu0", "h", 32e3), link("gpu1", "h", 32e3)]
    slow_sums = box("gpu", "gpu", links=links).with_each(
        "hosts", memory_bandwidth_bytes_per_s=3 * 8e6 / 200
    )
    shares = losses(beside_exchange=0.9, beside_copies=beside_copies)
    machine = slow_sums.model_copy(update={"losses": shares})
    work, strategy = chain((1000.0, 4), (1000.0, 8_000_000)), STRATEGIES["host"]
    found = forecast(work, machine, strategy, strategy.config(workers=2, chunk=1), 2)
    assert found.slowdown == pytest.approx(expected, rel=1e-4)


def test_the_cores_that_sum_are_those_that_compute() -> None:
    joined = box("cpu", "cpu").with_each("hosts", memory_bandwidth_bytes_per_s=3 * 8e6 / 200)
    shares = losses(beside_exchange=0.9, beside_copies=0.0)
    machine = joined.model_copy(update={"losses": shares})
    work, strategy = chain((1000.0, 4), (1000.0, 8_000_000)), STRATEGIES["host"]
    found = forecast(work, machine, strategy, strategy.config(workers=2, chunk=1), 2)
    assert found.slowdown > 1 + 0.9 * 190 / 2000


def parts(exposed_s: float) -> Breakdown:
    return Breakdown(0.0, 0.3, 0.7 - exposed_s, 0.0, 0.0, 0.0, exposed_s, 0.0)


@pytest.mark.parametrize(
    ("unrest", "exposed_s", "expected"),
    [(0.0, 0.0, 0.13), (0.05, 0.0, 0.13), (0.25, 0.0, 0.33), (0.0, 0.5, 0.195), (9.0, 0.0, 9.08)],
)
def test_a_restless_profile_widens_the_range(
    unrest: float, exposed_s: float, expected: float
) -> None:
    known = Losses.none("a test", unrest)
    machine = EqualDevices(device="v100", devices=2).machine("two", known)
    assert half_width(machine, parts(exposed_s)) == pytest.approx(expected)


def test_a_described_machine_is_the_less_sure_the_more_it_exchanges() -> None:
    machine = EqualDevices(device="v100", devices=2).machine("two")
    assert half_width(machine, parts(0.0)) < half_width(machine, parts(0.2))
    assert half_width(machine, parts(0.01)) == pytest.approx(0.07)
    assert half_width(machine, parts(0.7)) == pytest.approx(0.7)


def test_asynchronous_workers_wait_for_nobody() -> None:
    waits = {name: not one.is_asynchronous for name, one in STRATEGIES.items()}
    assert {name for name, waiting in waits.items() if not waiting} == {"wheel", "hogbatch"}
    machine = box("gpu", "gpu", links=[link("gpu0", "h", 1e12), link("gpu1", "h", 1e12)])
    spread = machine.model_copy(update={"losses": losses(spread=0.5)})
    for name in ("allreduce", "hogbatch"):
        strategy = STRATEGIES[name]
        config, work = strategy.config(workers=2), chain((1.0, 4), (1.0, 4))
        plain, slower = (
            forecast(work, each, strategy, config, 2).slowdown for each in (machine, spread)
        )
        assert plain == 1.0
        assert (slower > 1.2) is waits[name]


BESIDE, SLOWEST = "beside exchanges", "waiting for the slowest"


@pytest.mark.parametrize(
    ("shares", "longer"),
    [
        # 4 s of exchange beside 8 s of backward; two workers wait for 0.59 standard deviations.
        ({"beside_exchange": 0.5, "spread": 0.1}, f"31 %: {BESIDE}, and {SLOWEST}"),
        ({"beside_exchange": 0.5}, f"25 %: {BESIDE}"),
        ({"spread": 0.1}, f"6 %: {SLOWEST}"),
        ({}, None),
    ],
)
def test_a_forecast_names_what_makes_computation_longer_and_nothing_else(
    shares: dict[str, float], longer: str | None
) -> None:
    joined = box("cpu", "cpu", links=[link("h", "h", 1e6)])
    machine = joined.model_copy(update={"losses": losses(**shares)})
    work, strategy = chain((4.0, 2_000_000), (4.0, 2_000_000)), STRATEGIES["allreduce"]
    why = forecast(work, machine, strategy, strategy.config(workers=2), 2).why
    if longer is None:
        assert "longer" not in why
    else:
        percent, causes = longer.split(": ")
        assert f" of the step, {percent} longer than undisturbed: {causes}; " in why


def test_one_worker_neither_exchanges_nor_waits() -> None:
    machine = box("cpu").model_copy(update={"losses": losses(beside_exchange=0.5, spread=0.5)})
    strategy = STRATEGIES["allreduce"]
    found = forecast(chain((4.0, 4)), machine, strategy, strategy.config(workers=1), 1)
    assert found.why == "computes 100 % of the step; nothing is exchanged"


def test_of_workers_who_wait_for_nobody_no_wait_is_said() -> None:
    """Theirs exchange beside all that they compute; the others have one layer, and nothing then."""
    machine = box("gpu", "gpu", links=[link("gpu0", "h", 1e6), link("gpu1", "h", 1e6)])
    both = machine.model_copy(update={"losses": losses(beside_exchange=0.5, spread=0.1)})
    for name, causes in (("allreduce", f"6 %: {SLOWEST}"), ("hogbatch", f"50 %: {BESIDE}")):
        config, work = STRATEGIES[name].config(workers=2), chain((1.0, 2_000_000))
        why = forecast(work, both, STRATEGIES[name], config, 2).why
        assert f", {causes.replace(':', ' longer than undisturbed:')}; " in why
