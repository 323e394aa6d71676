from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from paceline.core.cost import (
    Measured,
    Rate,
    Roofline,
    codec_lanes,
    compute_lane,
    exchange_lane,
    link_lane,
)
from paceline.core.facts import Bytes, BytesPerSecond, FlopsPerSecond, Seconds
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind, PriceKey, Task, TaskId
from paceline.core.transfer import Ring
from refusals import refused

FACT = {"memory_bytes": "8 GiB", "memory_bandwidth_bytes_per_s": "10 GB/s", "source": "made up"}


def machine(devices: list[tuple[str, str, str]], links: list[tuple[str, str, str]]) -> Machine:
    hosts = sorted({host for _, host, _ in devices})
    return Machine.model_validate(
        {
            "name": "test",
            "hosts": [FACT | {"cores": 2, "name": host} for host in hosts],
            "devices": [
                FACT | {"flops_per_s": "1 Tflop/s", "name": name, "host": host, "kind": kind}
                for name, host, kind in devices
            ],
            "links": [
                {"between": [a, b], "bandwidth_bytes_per_s": w, "latency_s": "10 us", "source": "-"}
                for a, b, w in links
            ],
        }
    )


@pytest.mark.parametrize(
    ("unit", "text", "value"),
    [
        (BytesPerSecond, "1 Gbit/s", 125e6),
        (BytesPerSecond, "16 GB/s", 16e9),
        (BytesPerSecond, "1GiB/s", 2**30),
        (Bytes, "24 GiB", 24 * 2**30),
        (Bytes, 512, 512),
        (Seconds, "50 us", 50e-6),
        (Seconds, "1.5e2 ns", 150e-9),
        (FlopsPerSecond, "9.3 Tflop/s", 9.3e12),
    ],
)
def test_quantities_are_read_in_base_units(unit, text, value):
    assert TypeAdapter(unit).validate_python(text) == pytest.approx(value, rel=1e-12)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_refused(text: str):
    with suppress(ValidationError):
        assert TypeAdapter(Seconds).validate_python(text) >= 0


def names(route) -> list[str]:
    return [f"{hop.source}->{hop.target}" for hop in route]


def test_routes_take_the_fewest_hops_and_then_the_widest_way():
    gpus = [(f"gpu{i}", "box", "gpu") for i in range(4)]
    links = [
        ("gpu0", "gpu1", "20 GB/s"),
        ("gpu1", "gpu3", "20 GB/s"),
        ("gpu0", "gpu2", "40 GB/s"),
        ("gpu2", "gpu3", "40 GB/s"),
    ]
    m = machine(gpus, links)
    assert names(m.route(m.devices[0], m.devices[1])) == ["gpu0->gpu1"]
    assert names(m.route(m.devices[0], m.devices[3])) == ["gpu0->gpu2", "gpu2->gpu3"]
    assert names(m.route(m.devices[3], m.devices[0])) == ["gpu3->gpu2", "gpu2->gpu0"]


def with_a_switch(num_gpus: int, bus: str, own: str, together: str | None) -> Machine:
    """Return GPUs of one host, each on its bus and on a switch between them."""
    gpus = [(f"gpu{i}", "box", "gpu") for i in range(num_gpus)]
    fields = machine(gpus, [(name, "box", bus) for name, _, _ in gpus]).model_dump()
    shared = [] if together is None else [("links", "links", together)]
    for one, other, width in [*((name, "links", own) for name, _, _ in gpus), *shared]:
        link = {"between": [one, other], "bandwidth_bytes_per_s": width}
        fields["links"] += ({**link, "latency_s": 0.0, "source": "-"},)
    fields["switches"] = [{"name": "links", "source": "-"}]
    return Machine.model_validate(fields)


@pytest.mark.parametrize(("together", "shared"), [(None, []), ("6 GB/s", ["links->links"])])
def test_devices_that_have_a_switch_send_over_it_and_not_over_a_wider_bus(together, shared):
    m = with_a_switch(2, bus="16 GB/s", own="4 GB/s", together=together)
    assert names(m.route(*m.devices)) == ["gpu0->links", *shared, "links->gpu1"]
    assert names(m.route(m.devices[0], m.hosts[0])) == ["gpu0->box"]


@pytest.mark.parametrize("num_gpus", [2, 3, 4, 8])
@pytest.mark.parametrize("together", [1e9, 6e9, 12e9, 1e12])
def test_cards_that_share_a_way_divide_it(num_gpus: int, together: float):
    # Each of n cards sends 2 (n - 1) / n of the bytes at once: at its own rate, or an nth of all.
    m = with_a_switch(num_gpus, "16 GB/s", "4 GB/s", f"{together / 1e9:g} GB/s")
    ring, nbytes = Ring.at_once(m, m.devices, ()), 300e6
    each = min(4e9, together / num_gpus)
    expected = 2 * (num_gpus - 1) / num_gpus * nbytes / each
    assert ring.seconds(nbytes) == pytest.approx(expected)
    task = Task(TaskId(0, Kind.REDUCE, "t"), *ring.reduction(nbytes))
    assert Roofline.of(m).seconds(task) == pytest.approx(expected)


def test_cores_stand_where_their_host_stands():
    m = machine(
        [("cpu0", "a", "cpu"), ("cpu1", "a", "cpu"), ("cpu2", "b", "cpu")],
        [("a", "a", "1 GB/s"), ("a", "b", "1 Gbit/s")],
    )
    assert names(m.route(m.devices[0], m.devices[1])) == ["a->a"]
    assert names(m.route(m.devices[0], m.devices[2])) == ["a->b"]


def test_a_missing_way_is_named():
    apart = machine([("cpu0", "a", "cpu"), ("cpu1", "b", "cpu")], [])
    together = machine([("cpu0", "a", "cpu"), ("cpu1", "a", "cpu")], [])
    for m in (apart, together):
        with refused("machine test"):
            m.route(*m.devices)


@pytest.mark.parametrize(
    ("flops", "nbytes", "num_calls", "seconds"),
    [(4e12, 0, 0, 4.0), (0, 300e9, 0, 3.0), (1e12, 500e9, 0, 5.0), (1e12, 0, 10, 1.0001)],
)
def test_roofline_takes_the_slower_of_arithmetic_and_traffic(flops, nbytes, num_calls, seconds):
    rate = Rate(flops_per_s=1e12, nbytes_per_s=100e9, call_latency_s=1e-5)
    lane = compute_lane("gpu0")
    task = Task(TaskId(0, Kind.FORWARD, "t"), (lane,), Cost(flops, nbytes, num_calls))
    assert Roofline({lane: rate}).seconds(task) == pytest.approx(seconds)


def test_a_transfer_is_priced_by_its_link_and_not_by_the_devices_that_it_holds():
    m = machine([("cpu0", "a", "cpu"), ("cpu1", "b", "cpu")], [("a", "b", "1 Gbit/s")])
    on = (link_lane("b", "a"), exchange_lane("cpu0"), exchange_lane("cpu1"))
    task = Task(TaskId(0, Kind.REDUCE, "t"), on, Cost(nbytes=125e6, num_calls=2))
    assert Roofline.of(m).seconds(task) == pytest.approx(1 + 2e-5)


def test_nothing_to_price_by_is_an_error():
    task = Task(TaskId(0, Kind.REDUCE, "t"), (exchange_lane("cpu0"),), Cost(1))
    with pytest.raises(ValueError, match="cpu0/exchange"):
        Roofline({}).seconds(task)


def test_measured_prices_come_first():
    lane = compute_lane("cpu0")
    cost = Measured({PriceKey("cpu0", Kind.FORWARD, "conv1"): 0.5}, Roofline({lane: Rate(1.0)}))
    known = Task(TaskId(0, Kind.FORWARD, "conv1", 0), (lane,), Cost(7))
    unknown = Task(TaskId(0, Kind.BACKWARD, "conv1", 0), (lane,), Cost(7))
    assert (cost.seconds(known), cost.seconds(unknown)) == (0.5, 7.0)


@pytest.mark.parametrize("kind", [Kind.ENCODE, Kind.DECODE])
def test_a_codec_is_priced_by_its_speed_and_holds_what_computes(kind):
    speed = {"encode_values_per_s": 1e9, "decode_values_per_s": 4e9, "latency_s": 0.5}
    m = machine([("gpu0", "a", "gpu")], [])
    device = m.devices[0].model_dump() | {"codecs": {"eightbit": speed}}
    m = Machine.model_validate(m.model_dump() | {"devices": [device]})
    on = codec_lanes(m.devices[0], "eightbit", kind)
    assert compute_lane("gpu0") in on
    task = Task(TaskId(0, kind, "t"), on, Cost(flops=8e9, num_calls=2))
    assert Roofline.of(m).seconds(task) == (9.0 if kind is Kind.ENCODE else 3.0)


def test_a_copy_with_other_links_has_other_ways():
    slow = machine([("cpu0", "a", "cpu"), ("cpu1", "b", "cpu")], [("a", "b", "1 Gbit/s")])
    assert len(slow.route(*slow.devices)) == 1
    faster = slow.links[0].model_copy(update={"bandwidth_bytes_per_s": 1e9})
    copied = slow.model_copy(update={"links": (faster,)})
    assert copied.route(*copied.devices)[0].link is faster
    with refused("machine test"):
        copied.model_copy(update={"links": ()}).route(*copied.devices)


def test_groups_hold_all_hosts():
    m = machine([(f"cpu{i}", f"h{i}", "cpu") for i in range(4)], [])
    assert Machine.model_validate(m.model_dump() | {"groups": [2, 2]}).groups == (2, 2)
    with pytest.raises(ValidationError):
        Machine.model_validate(m.model_dump() | {"groups": [2, 3]})
