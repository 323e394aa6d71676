"""Seconds per layer of a device, alone and scaled to what somebody measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cost import Rate, Roofline, Totals, compute_lane, layer_times, update_cost
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Parameter, Workload

# Two parameters of 40 and 60 values, 400 bytes of gradients.
WORKLOAD = Workload(
    "net",
    8,
    (
        Layer("a", (Parameter("a.w", (4, 10)),), 0, Cost(300, 10, 1), Cost(600, 20, 2)),
        Layer("b", (Parameter("b.w", (60,)),), 0, Cost(100, 4000, 3), Cost(200, 8000, 6)),
    ),
    (1, 0),
    0,
)
RATE = Rate(flops_per_s=100, nbytes_per_s=1000, call_latency_s=0.25)
TABLE_3 = Totals(50.6e-3, 104e-3, 5.1e-3)  # Le et al. 2018: AlexNet on a P100


def test_a_layer_takes_the_longer_of_arithmetic_and_traffic_and_its_latencies():
    times = layer_times(WORKLOAD, RATE)
    assert times.forward_s == (3 + 0.25, 4 + 0.75)  # the first is arithmetic, the second traffic
    assert times.backward_s == (6 + 0.5, 8 + 1.5)
    # 4 flops and 5 times 4 bytes for each of 100 values, two calls for each of 2 tensors.
    assert update_cost(WORKLOAD) == Cost(400, 2000, 4)
    assert times.update_s == 4 + 1.0


def test_the_rate_of_a_device_is_in_the_roofline_of_its_machine():
    facts = {"memory_bytes": 1e9, "source": "made up"}
    host = facts | {"name": "h", "cores": 1, "memory_bandwidth_bytes_per_s": 1}
    device = facts | {
        "name": "p100",
        "host": "h",
        "kind": "gpu",
        "flops_per_s": 100,
        "memory_bandwidth_bytes_per_s": 1000,
        "call_latency_s": 0.25,
    }
    machine = Machine.model_validate({"name": "m", "hosts": [host], "devices": [device]})
    rate = Roofline.of(machine).rates[compute_lane("p100")]
    assert layer_times(WORKLOAD, rate) == layer_times(WORKLOAD, RATE)


@given(
    st.builds(
        Rate,
        st.floats(1e3, 1e15),
        st.floats(1e3, 1e13),
        st.floats(0, 1e-3),
    ),
    st.builds(Totals, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)),
)
def test_phases_sum_to_their_totals_and_layers_keep_their_proportions(rate: Rate, totals: Totals):
    plain, scaled = layer_times(WORKLOAD, rate), layer_times(WORKLOAD, rate, totals)
    assert sum(scaled.forward_s) == pytest.approx(totals.forward_s)
    assert sum(scaled.backward_s) == pytest.approx(totals.backward_s)
    assert scaled.update_s == pytest.approx(totals.update_s)
    for one, other in ((plain.forward_s, scaled.forward_s), (plain.backward_s, scaled.backward_s)):
        assert one[0] * other[1] == pytest.approx(one[1] * other[0])


def test_the_papers_table_3_is_kept():
    times = layer_times(WORKLOAD, RATE, TABLE_3)
    total = sum(times.forward_s) + sum(times.backward_s) + times.update_s
    assert total == pytest.approx(0.1597)


def test_an_infinitely_fast_device_takes_no_time():
    assert layer_times(WORKLOAD, Rate()) == ((0.0, 0.0), (0.0, 0.0), 0.0)
    assert layer_times(WORKLOAD, Rate(), Totals(0, 0, 0)) == ((0.0, 0.0), (0.0, 0.0), 0.0)


@pytest.mark.parametrize(
    ("rate", "totals", "message"),
    [
        (Rate(), Totals(0, 1, 0), r"backward: 1 s cannot be shared"),
        (RATE, Totals(1, 1, -1), r"update: a phase cannot take -1 s"),
    ],
)
def test_totals_that_cannot_be_met_are_refused(rate: Rate, totals: Totals, message: str):
    with pytest.raises(ValueError, match=message):
        layer_times(WORKLOAD, rate, totals)
