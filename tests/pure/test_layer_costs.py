"""Seconds per layer of a device, alone and scaled to a measurement; and the memory of a step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box
from paceline.core.cost import Rate, Roofline, Totals, compute_lane, layer_times, update_cost
from paceline.core.workload import (
    Cost,
    Layer,
    Parameter,
    Workload,
    feature_nbytes,
    largest_batch,
    replica_nbytes,
)

# Two parameters of 40 and 60 values, 400 bytes of gradients.
LAYERS = (
    Layer("a", (Parameter("a.w", (4, 10)),), 0, Cost(300, 10, 1), Cost(600, 20, 2)),
    Layer("b", (Parameter("b.w", (60,)),), 0, Cost(100, 4000, 3), Cost(200, 8000, 6)),
)
WORKLOAD = Workload("net", 8, LAYERS, (1, 0), 0)
RATE = Rate(flops_per_s=100, nbytes_per_s=1000, call_latency_s=0.25)


def test_a_layer_takes_the_longer_of_arithmetic_and_traffic_and_its_latencies():
    times = layer_times(WORKLOAD, RATE)
    assert times.forward_s == (3 + 0.25, 4 + 0.75)  # the first is arithmetic, the second traffic
    assert times.backward_s == (6 + 0.5, 8 + 1.5)
    # 4 flops and 5 times 4 bytes for each of 100 values, two calls for each of 2 tensors.
    assert update_cost(WORKLOAD) == Cost(400, 2000, 4)
    assert times.update_s == 4 + 1.0
    facts = {
        "flops_per_s": 100,
        "memory_bandwidth_bytes_per_s": 1000,
        "call_latency_s": 0.25,
    }
    rate = Roofline.of(box("gpu", device=facts)).rates[compute_lane("gpu0")]
    assert layer_times(WORKLOAD, rate) == times


@given(
    st.builds(Rate, st.floats(1e3, 1e15), st.floats(1e3, 1e13), st.floats(0, 1e-3)),
    st.builds(Totals, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10)),
)
def test_phases_sum_to_their_totals_and_layers_keep_their_proportions(rate: Rate, totals: Totals):
    plain, scaled = layer_times(WORKLOAD, rate), layer_times(WORKLOAD, rate, totals)
    assert sum(scaled.forward_s) == pytest.approx(totals.forward_s)
    assert sum(scaled.backward_s) == pytest.approx(totals.backward_s)
    assert scaled.update_s == pytest.approx(totals.update_s)
    for one, other in ((plain.forward_s, scaled.forward_s), (plain.backward_s, scaled.backward_s)):
        assert one[0] * other[1] == pytest.approx(one[1] * other[0])


def test_an_infinitely_fast_device_takes_no_time():
    assert layer_times(WORKLOAD, Rate()) == ((0.0, 0.0), (0.0, 0.0), 0.0)
    assert layer_times(WORKLOAD, Rate(), Totals(0, 0, 0)) == ((0.0, 0.0), (0.0, 0.0), 0.0)


@pytest.mark.parametrize(
    ("rate", "totals", "phase"),
    [(Rate(), Totals(0, 1, 0), "backward"), (RATE, Totals(1, 1, -1), "update")],
)
def test_totals_that_cannot_be_met_are_refused(rate: Rate, totals: Totals, phase: str):
    with pytest.raises(ValueError, match=f"^{phase}: "):
        layer_times(WORKLOAD, rate, totals)


def keeping(name: str, values: int, kept: int, working: int | None) -> Layer:
    return Layer(name, (Parameter(name, (values,)),), kept, Cost(), Cost(), kept, working)


def of(*layers: Layer) -> Workload:
    return Workload("test", 1, layers, tuple(reversed(range(len(layers)))), 8)


def test_gradients_come_as_feature_maps_go() -> None:
    # Backward of "b" has all that is kept and its own gradient; that of "a" has both gradients, but
    # no more what "b" kept.
    layers = (keeping("a", 100, 1000, 20), keeping("b", 10, 3000, 50))
    state, batch = 2 * 4 * 110, 8
    most = max(1000 + 3000 + 4 * 10 + 50, 1000 + 4 * 110 + 20)
    assert replica_nbytes(of(*layers)) == state + batch + most
    late = of(keeping("a", 100, 3000, 20), keeping("b", 10, 10, 50))
    assert replica_nbytes(late) == state + batch + 3000 + 4 * 110 + 20
    # A model that keeps nothing needs three copies; without gradients features alone count.
    assert replica_nbytes(of(keeping("a", 100, 0, 0))) == 3 * 400 + 8
    assert (feature_nbytes(layers), feature_nbytes(())) == (4050, 0)


@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 10**8))
def test_the_largest_batch_is_the_last_one_that_is_predicted_to_fit(kept, working, values, limit):
    one = of(keeping("a", values + 1, kept + 1, working), keeping("b", 7, 40, 30))

    def needed(size: int) -> int:
        layers = tuple(
            replace(
                layer,
                kept_nbytes=size * (layer.kept_nbytes or 0),
                working_nbytes=size * (layer.working_nbytes or 0),
            )
            for layer in one.layers
        )
        return replica_nbytes(replace(one, layers=layers, input_nbytes=8 * size))

    found = largest_batch(one, limit)
    assert needed(found + 1) > limit
    assert found == 0 or needed(found) <= limit
