from dataclasses import replace

import pytest

from paceline.core.cost import Measured, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.planner import Forecast, forecast, rank
from paceline.strategies import find_strategy
from paceline.strategies.allreduce.config import AllReduce

ALLREDUCE = find_strategy("allreduce")
FLOPS_PER_S, WIRE_PER_S, LATENCY_S = 1e9, 1e6, 0.5


def machine(num_devices: int = 2, uses_cores: bool = False, memory_per_s: float = 1e15) -> Machine:
    """Devices of 1 Gflop/s on one host, whose link takes 1 MB/s."""
    fact = {"memory_bytes": 1, "memory_bandwidth_bytes_per_s": memory_per_s, "source": "made up"}
    device = fact | {"host": "h", "kind": "cpu", "flops_per_s": FLOPS_PER_S}
    link = {
        "between": ["h", "h"],
        "bandwidth_bytes_per_s": WIRE_PER_S,
        "latency_s": LATENCY_S,
        "uses_cores": uses_cores,
        "source": "made up",
    }
    return Machine.model_validate(
        {
            "name": "small",
            "hosts": [fact | {"name": "h", "cores": num_devices}],
            "devices": [device | {"name": f"cpu{i}"} for i in range(num_devices)],
            "links": [link],
        }
    )


def workload(batch_size: int = 8) -> Workload:
    """Forward 1 s and 2 s, backward 3 s and 5 s; 1 and 2 MB of gradients."""
    one = Layer("one", (Parameter("one.weight", (250_000,)),), 0, Cost(1e9), Cost(3e9))
    two = Layer("two", (Parameter("two.weight", (500_000,)),), 0, Cost(2e9), Cost(5e9))
    return Workload("pair", batch_size, (one, two), (1, 0), 0)


UPDATE_S = 4 * 750_000 / FLOPS_PER_S
COMPUTE_S = 1 + 2 + 3 + 5 + UPDATE_S
# Two buckets; two ranks send all their bytes through the link, in two messages that follow.
TWO_S, ONE_S = 2 * 2 + 2 * LATENCY_S, 2 * 1 + 2 * LATENCY_S


def forecast_of(workers: int, **options) -> Forecast:
    config, num_samples = AllReduce(workers=workers), 7 * workers
    return forecast(workload(), machine(**options), ALLREDUCE, config, num_samples)


def test_one_worker_only_computes():
    found = forecast_of(1)
    assert found.step_s == pytest.approx(COMPUTE_S)
    assert found.samples_per_s == pytest.approx(7 / COMPUTE_S)
    assert (found.wire_nbytes, found.devices) == (0, ("cpu0",))
    assert found.why == "computes 100 % of the step; nothing is exchanged"


def test_buckets_hide_behind_backward_as_far_as_it_lasts():
    found = forecast_of(2)
    # 5 s of exchange begin when the 3 s of the first layer's backward do; 3 s follow the last.
    assert found.step_s == pytest.approx(COMPUTE_S + (TWO_S - 3) + ONE_S)
    assert found.samples_per_s == pytest.approx(14 / found.step_s)
    assert found.breakdown.hidden_s == pytest.approx(3)
    assert found.breakdown.exposed_s == pytest.approx(TWO_S + ONE_S - 3)
    assert found.devices == ("cpu0", "cpu1")
    assert found.why == "computes 69 % of the step; 31 % is communication that shows, of 8e+03 ms"


def test_nothing_hides_where_the_cores_carry_the_bytes():
    found = forecast_of(2, uses_cores=True)
    assert found.step_s == pytest.approx(COMPUTE_S + TWO_S + ONE_S)
    assert found.breakdown.hidden_s == 0


def test_bytes_on_the_wire_are_no_memory_traffic_of_the_cores_that_carry_them():
    # The cores' memory is slower than the link; the layers here have no memory traffic.
    slow = forecast_of(2, uses_cores=True, memory_per_s=1e5)
    update_s = 5 * 3e6 / 1e5  # momentum SGD reads three values of each parameter and writes two
    assert slow.step_s == pytest.approx(COMPUTE_S - UPDATE_S + update_s + TWO_S + ONE_S)


def test_wire_bytes_are_those_of_a_step_on_the_busiest_link():
    assert forecast_of(2).wire_nbytes == pytest.approx(2 * 3e6)
    # Four ranks send 6/4 of the gradients each.
    assert forecast_of(4, num_devices=4).wire_nbytes == pytest.approx(4 * 1.5 * 3e6)


def test_measured_prices_replace_those_of_the_machine():
    found = machine(1)
    measured = Measured({("cpu0", Kind.FORWARD, "two"): 10.0}, Roofline.of(found))
    predicted = forecast(workload(), found, ALLREDUCE, AllReduce(workers=1), 8, measured)
    assert predicted.step_s == pytest.approx(COMPUTE_S - 2 + 10)


def test_the_timeline_is_a_prediction_of_several_steps():
    found = forecast_of(2)
    assert found.timeline.origin == "predicted"
    assert found.timeline.num_steps() == 8
    assert found.timeline.period_s() == pytest.approx(found.step_s)


def test_the_best_throughput_comes_first_and_ties_keep_their_order():
    base = forecast_of(1)
    rates = [("a", 10.0), ("b", 30.0), ("c", 10.0), ("d", 20.0)]
    mixed = [replace(base, strategy=name, samples_per_s=rate, step_s=1) for name, rate in rates]
    assert [one.strategy for one in rank(mixed)] == ["b", "d", "a", "c"]


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidInput, match="workers: 3 do not fit on machine 'small'"):
        forecast_of(3)
