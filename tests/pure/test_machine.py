"""Quantities, routes between devices, costs of tasks and layers, and memory of a step."""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from boxes import box, link
from paceline.core.cost import (
    Rate,
    Roofline,
    Totals,
    compute_lane,
    exchange_lane,
    layer_times,
    update_cost,
)
from paceline.core.facts import Bytes, BytesPerSecond, Seconds
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Task, TaskId
from paceline.core.transfer import Ring
from paceline.core.workload import (
    Cost,
    Layer,
    Parameter,
    Workload,
    feature_nbytes,
    largest_batch,
    replica_nbytes,
)
from refusals import refused


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        (BytesPerSecond, "1 Gbit/s", 125e6),
        (BytesPerSecond, "1GiB/s", 2**30),
        (Bytes, 512, 512),
        (Seconds, "1.5e2 ns", 150e-9),
    ],
)
def test_quantities_are_read_in_base_units(unit, text, value):
    assert TypeAdapter(unit).validate_python(text) == pytest.approx(value, rel=1e-12)


@given(st.text(max_size=12))
def test_any_text_is_parsed_or_refused(text: str):
    with suppress(ValidationError):
        assert TypeAdapter(Seconds).validate_python(text) >= 0


def names(route) -> list[str]:
    return [f"{hop.source}->{hop.target}" for hop in route]


def test_routes_have_the_fewest_hops_and_then_the_widest_links():
    pairs = ("gpu0", "gpu1", 20e9), ("gpu1", "gpu3", 20e9), ("gpu0", "gpu2", 40e9)
    links = [link(*pair) for pair in (*pairs, ("gpu2", "gpu3", 40e9))]
    m = box(*["gpu"] * 4, links=links)
    assert names(m.route(m.devices[0], m.devices[1])) == ["gpu0->gpu1"]
    assert names(m.route(m.devices[0], m.devices[3])) == ["gpu0->gpu2", "gpu2->gpu3"]
    assert names(m.route(m.devices[3], m.devices[0])) == ["gpu3->gpu2", "gpu2->gpu0"]
    # CPU workers are located at their host.
    m = box("cpu", "cpu", "cpu", hosts="aab", links=[link("a", "a", 1e9), link("a", "b", 1e8)])
    ways = [names(m.route(m.devices[0], other)) for other in m.devices[1:]]
    assert ways == [["a->a"], ["a->b"]]


def with_a_switch(num_gpus: int, together: float | None) -> Machine:
    """Return GPUs of one host, each with a bus of 16 GB/s and 4 GB/s to a switch."""
    ends = product([f"gpu{i}" for i in range(num_gpus)], [("h", 16e9), ("links", 4e9)])
    links = [link(gpu, end, rate) for gpu, (end, rate) in ends]
    links += [] if together is None else [link("links", "links", together)]
    fields = {"links": links, "switches": [{"name": "links", "source": "-"}]}
    return Machine.model_validate(box(*["gpu"] * num_gpus).model_dump() | fields)


@pytest.mark.parametrize("num_gpus", [2, 3, 4, 8])
@pytest.mark.parametrize("together", [1e9, 6e9, 12e9, 1e12, None])
def test_gpus_divide_the_shared_rate_of_a_switch(num_gpus: int, together: float | None):
    # They send over the switch, although the bus of their host is wider.
    # Each of n GPUs sends 2 (n - 1) / n of the bytes, at its own rate or an nth of the shared rate.
    m = with_a_switch(num_gpus, together)
    ring, nbytes = Ring.at_once(m, m.devices, ()), 300e6
    each = min(4e9, (together or inf) / num_gpus)
    expected = 2 * (num_gpus - 1) / num_gpus * nbytes / each
    assert ring.seconds(nbytes) == pytest.approx(expected)
    task = Task(TaskId(0, Kind.REDUCE, "t"), *ring.reduction(nbytes))
    assert Roofline.of(m).seconds(task) == pytest.approx(expected)


def test_a_resource_without_a_rate_is_an_error():
    task = Task(TaskId(0, Kind.REDUCE, "t"), (exchange_lane("cpu0"),), Cost(1))
    with pytest.raises(ValueError, match="cpu0/exchange"):
        Roofline({}).seconds(task)


def test_a_copy_with_other_links_has_other_routes():
    slow = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 125e6)])
    assert len(slow.route(*slow.devices)) == 1
    faster = slow.links[0].model_copy(update={"bandwidth_bytes_per_s": 1e9})
    copied = slow.model_copy(update={"links": (faster,)})
    assert copied.route(*copied.devices)[0].link is faster
    with refused("machine box"):
        copied.model_copy(update={"links": ()}).route(*copied.devices)


# Parameters of 40 and 60 values: 400 bytes of gradients.
LAYERS = (
    Layer("a", (Parameter("a.w", (4, 10)),), 0, Cost(300, 10, 1), Cost(600, 20, 2)),
    Layer("b", (Parameter("b.w", (60,)),), 0, Cost(100, 4000, 3), Cost(200, 8000, 6)),
)
WORKLOAD = Workload("net", 8, LAYERS, (1, 0), 0)
RATE = Rate(flops_per_s=100, nbytes_per_s=1000, call_latency_s=0.25)


def test_a_layer_takes_the_maximum_of_arithmetic_and_traffic_plus_latencies():
    times = layer_times(WORKLOAD, RATE)
    assert times.forward_s == (3 + 0.25, 4 + 0.75)  # bound by arithmetic; by traffic
    assert times.backward_s == (6 + 0.5, 8 + 1.5)
    # Each of 100 values has 4 flops and 5 times 4 bytes; each of 2 tensors has two calls.
    assert update_cost(WORKLOAD) == Cost(400, 2000, 4)
    assert times.update_s == 4 + 1.0
    facts = {"flops_per_s": 100, "memory_bandwidth_bytes_per_s": 1000, "call_latency_s": 0.25}
    rate = Roofline.of(box("gpu", device=facts)).rates[compute_lane("gpu0")]
    assert layer_times(WORKLOAD, rate) == times
    for totals in (Totals(), Totals(0, 0, 0)):  # an infinitely fast device
        assert layer_times(WORKLOAD, Rate(), totals) == ((0.0, 0.0), (0.0, 0.0), 0.0)


def test_a_total_for_a_phase_without_time_is_refused():
    with pytest.raises(ValueError, match="backward"):
        layer_times(WORKLOAD, Rate(), Totals(0, 1, 0))


def keeping(name: str, values: int, kept: int, working: int | None) -> Layer:
    return Layer(name, (Parameter(name, (values,)),), kept, Cost(), Cost(), kept, working)


def of(*layers: Layer) -> Workload:
    return Workload("test", 1, layers, tuple(reversed(range(len(layers)))), 8)


def test_backward_allocates_gradients_and_frees_feature_maps() -> None:
    # Backward of "b" holds all features and its own gradients. Backward of "a" holds the gradients
    # of both layers, but no longer the features of "b".
    layers = (keeping("a", 100, 1000, 20), keeping("b", 10, 3000, 50))
    state, batch = 2 * 4 * 110, 8
    most = max(1000 + 3000 + 4 * 10 + 50, 1000 + 4 * 110 + 20)
    assert replica_nbytes(of(*layers)) == state + batch + most
    late = of(keeping("a", 100, 3000, 20), keeping("b", 10, 10, 50))
    assert replica_nbytes(late) == state + batch + 3000 + 4 * 110 + 20
    # Without features three copies of the parameters count; without gradients only features do.
    assert replica_nbytes(of(keeping("a", 100, 0, 0))) == 3 * 400 + 8
    assert (feature_nbytes(layers), feature_nbytes(())) == (4050, 0)


@given(st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 10**8))
def test_the_largest_batch_fits_and_a_larger_one_does_not(kept, working, values, limit):
    def sized(size: int) -> Workload:
        one = keeping("a", values + 1, size * (kept + 1), size * working)
        return replace(of(one, keeping("b", 7, size * 40, size * 30)), input_nbytes=8 * size)

    found = largest_batch(sized(1), limit)
    assert replica_nbytes(sized(found + 1)) > limit
    assert found == 0 or replica_nbytes(sized(found)) <= limit
