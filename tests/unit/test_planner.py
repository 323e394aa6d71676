"""Forecasts of a step with and without a codec, and the numbers of workers that are searched."""

import pytest

from boxes import box, link
from paceline.core.losses import Losses
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast, search
from paceline.planner.search import worker_counts
from paceline.strategies import find_exchange
from paceline.strategies.allreduce.config import AllReduce
from refusals import refused

ALLREDUCE = find_exchange("allreduce")
FLOPS_PER_S, WIRE_PER_S, LATENCY_S = 1e9, 1e6, 0.5


def machine(num_devices: int = 2, uses_cores: bool = False, memory_per_s: float = 1e15) -> Machine:
    """Create a host with devices of 1 Gflop/s and a loopback link of 1 MB/s."""
    wire = link("h", "h", WIRE_PER_S, LATENCY_S, uses_cores=uses_cores)
    fact = {"memory_bandwidth_bytes_per_s": memory_per_s}
    return box(*["cpu"] * num_devices, links=[wire], host=fact, device=fact)


def workload(batch_size: int = 8) -> Workload:
    """Create two layers: forward 1 and 2 s, backward 3 and 5 s, gradients 1 and 2 MB."""
    one = Layer("one", (Parameter("one.weight", (250_000,)),), 0, Cost(1e9), Cost(3e9))
    two = Layer("two", (Parameter("two.weight", (500_000,)),), 0, Cost(2e9), Cost(5e9))
    return Workload("pair", batch_size, (one, two), (1, 0), 0)


UPDATE_S = 4 * 750_000 / FLOPS_PER_S
COMPUTE_S = 1 + 2 + 3 + 5 + UPDATE_S
# Two buckets; two ranks send all their bytes over one link, in two successive messages.
TWO_S, ONE_S = 2 * 2 + 2 * LATENCY_S, 2 * 1 + 2 * LATENCY_S


def forecast_of(workers: int, **options) -> Forecast:
    config, num_samples = AllReduce(workers=workers), 7 * workers
    return forecast(workload(), machine(**options), ALLREDUCE, config, num_samples)


def test_buckets_hide_behind_backward_as_far_as_it_lasts():
    found = forecast_of(2)
    # 5 s of exchange begin with the first layer's backward of 3 s; 3 s follow after backward.
    assert found.step_s == pytest.approx(COMPUTE_S + (TWO_S - 3) + ONE_S)
    assert found.samples_per_s == pytest.approx(14 / found.step_s)
    assert found.breakdown.hidden_s == pytest.approx(3)
    assert found.breakdown.exposed_s == pytest.approx(TWO_S + ONE_S - 3)
    assert found.devices == ("cpu0", "cpu1")
    assert all(figure in found.why for figure in ("69 %", "31 %", "8.00 s"))


def test_bytes_on_the_wire_are_no_memory_traffic_of_the_cores_that_carry_them():
    # The cores' memory is slower than the link; the layers here have no memory traffic.
    slow = forecast_of(2, uses_cores=True, memory_per_s=1e5)
    update_s = 5 * 3e6 / 1e5  # momentum SGD reads three values of each parameter and writes two
    copies_s = 2 * 3e6 / 1e5  # gradients into buckets: longer than the 8 s of both backwards
    assert slow.step_s == pytest.approx(1 + 2 + copies_s + update_s + TWO_S + ONE_S)


SPEED = {"encode_values_per_s": 1e9, "decode_values_per_s": 1e9}


def hosts(*kernels: str) -> Machine:
    """Two hosts of one core each, with the speeds of these codecs' kernels."""
    facts = {"device": {"codecs": dict.fromkeys(kernels, SPEED)}}
    return box("cpu", "cpu", hosts="ab", links=[link("a", "b", 1e6, 1e-3)], **facts)


def forecasts(machine: Machine, name: str = "allreduce", workers: int = 2) -> list[Forecast]:
    """Return the forecasts of a strategy, beginning with the one without a codec."""
    found = search(lambda _: workload(), machine, [find_exchange(name)], 8, workers)
    codecs = (None, "half", "bfloat16", "dynamic8", "onebit")
    return sorted(found, key=lambda one: codecs.index(one.codec))


@pytest.mark.parametrize(
    ("name", "kernels", "codecs"),
    [
        ("allreduce", (), [None]),
        ("allreduce", ("cast",), [None, "half", "bfloat16"]),
        ("allreduce", ("eightbit", "onebit"), [None, "dynamic8", "onebit"]),
        ("host", ("eightbit",), [None, "dynamic8"]),
        ("tree", ("eightbit",), [None]),
    ],
)
def test_codecs_whose_speed_is_known_are_forecast(name, kernels, codecs):
    found = forecasts(hosts(*kernels), name)
    assert [one.codec for one in found] == codecs
    assert {one.config.workers for one in found} == {2}


def test_nothing_is_forecast_for_codecs_that_encode_nothing():
    fast = {"device": {"codecs": {"eightbit": SPEED}}}
    on_one = box("cpu", "cpu", links=[link("h", "h", WIRE_PER_S, LATENCY_S)], **fast)
    assert [one.codec for one in forecasts(on_one, "host")] == [None]
    assert [one.codec for one in forecasts(on_one)] == [None, "dynamic8"]
    assert [one.codec for one in forecasts(on_one, workers=1)] == [None]


def test_a_restless_profile_leaves_positive_steps():
    known = {"losses": Losses.none("a test", unrest=2.0)}  # wider than the step itself
    (found,) = forecasts(hosts().model_copy(update=known))
    shortest_s, longest_s = found.range_s
    assert (shortest_s, longest_s > 3 * found.step_s) == (0.0, True)


def test_any_number_of_workers_can_be_given_and_some_of_many_are_searched():
    twenty = machine(20)
    assert worker_counts(twenty, 64, None) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    assert worker_counts(twenty, 6, None) == [1, 2, 3, 4, 5, 6]
    assert worker_counts(twenty, 64, 9) == [9]
    assert worker_counts(twenty, 64, 40, shares_devices=True) == [40]
    for wanted, batch_size in ((21, 64), (7, 6), (0, 64)):
        with refused("workers"):
            worker_counts(twenty, batch_size, wanted)
