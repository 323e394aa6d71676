"""The crossover chart, and a timeline as text."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, chain, codec_speed, link
from paceline.core.cost import compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind, Lane, Resource
from paceline.core.timeline import Span, Timeline
from paceline.core.workload import Workload
from paceline.planner.explain import drawing
from paceline.planner.sweep import Range, chart, parse_range, shown, sweep
from paceline.strategies import EXCHANGES
from refusals import refused


def workload(samples: int) -> Workload:
    return replace(chain((0.1, 40_000_000)), batch_size=samples)


MACHINE = box(
    "cpu",
    "cpu",
    hosts="ab",
    links=[link("a", "b", 1e6), link("a", "a", 1e9), link("b", "b", 1e9)],
    device={"codecs": {"eightbit": codec_speed(4e7, 4e7)}},
)
SWEEP = sweep(workload, MACHINE, EXCHANGES.values(), 8, parse_range("bandwidth=100M:10G"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bandwidth=100M:10G", Range("bandwidth", 1e8, 1e10)),
        ("bandwidth=0.5Gbit/s:2 Gbit/s", Range("bandwidth", 5e8, 2e9)),
        ("latency=10u:1m", Range("latency", 1e-5, 1e-3)),
        ("latency=1ms:0.1s", Range("latency", 1e-3, 0.1)),
    ],
)
def test_ranges_have_units(text, found):
    parsed = parse_range(text)
    assert parsed.quantity == found.quantity
    assert (parsed.first, parsed.last) == pytest.approx((found.first, found.last))


@pytest.mark.parametrize(
    "text",
    ["", "bandwidth", "bandwidth=1G", "bandwidth=2G:1G", "bandwidth=1G:1G", "bandwidth=0:1G",
     "width=1M:1G", "bandwidth=1X:2X", "latency=1M:1k:1", "bandwidth=-1G:1G", "latency=nan:inf"],
)  # fmt: skip
def test_what_is_no_range_is_refused(text):
    with refused("sweep"):
        parse_range(text)


@given(st.text(max_size=30))
def test_any_text_is_a_range_or_refused(text):
    try:
        found = parse_range(f"bandwidth={text}")
    except InvalidInput:
        return
    assert 0 < found.first < found.last


def test_values_are_even_on_a_log_scale():
    values = Range("bandwidth", 1e8, 1e10).values
    assert (values[0], values[-1]) == pytest.approx((1e8, 1e10))
    ratios = [b / a for a, b in itertools.pairwise(values)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_only_links_between_hosts_are_swept():
    slowest, fastest = SWEEP.rankings[0][0].machine, SWEEP.rankings[-1][0].machine
    speeds = {one.between: one.bandwidth_bytes_per_s for one in fastest.links}
    assert speeds == {("a", "b"): pytest.approx(10e9 / 8), ("a", "a"): 1e9, ("b", "b"): 1e9}
    assert slowest.links[0].bandwidth_bytes_per_s == pytest.approx(1e8 / 8)


def test_a_codec_is_best_on_a_slow_link_and_none_on_a_fast_one():
    series = SWEEP.series
    plain, encoded = series["allreduce"], series["allreduce + codec"]
    assert encoded[0] > 2 * plain[0]
    assert plain[-1] > encoded[-1]
    assert list(plain) == sorted(plain)
    first, last = SWEEP.sentences[0], SWEEP.sentences[-1]
    assert first.startswith("100 Mbit/s ")
    assert first.endswith(" + codec")
    assert "10 Gbit/s" in last
    assert last.endswith(" allreduce")


def test_the_chart_shows_every_way_at_every_value():
    lines = chart(SWEEP).splitlines()
    names = {line.split(maxsplit=1)[1]: line.split()[0] for line in lines[18:]}
    assert set(names) == set(SWEEP.series)
    top = lines[0].split("|")[1]
    assert top.rstrip()[-1] == names["allreduce"]  # the best of the last value is on top
    assert shown(SWEEP.range, 1e8) in lines[16]


def test_a_whole_step_is_drawn_with_what_takes_its_time():
    parts = [
        (Kind.FORWARD, "compute", 0, 1),
        (Kind.STEP, "compute", 1, 2),
        (Kind.FORWARD, "compute", 2, 38),
        (Kind.BACKWARD, "compute", 38, 73),
        (Kind.D2H, "d2h", 56, 65),
        (Kind.STEP, "compute", 73, 74),
        (Kind.FORWARD, "compute", 74, 145),
        (Kind.STEP, "compute", 145, 146),
    ]
    spans = [
        Span(kind, i, "", None, (Resource("gpu", Lane(lane)),), start, end)
        for i, (kind, lane, start, end) in enumerate(parts)
    ]
    first, second, legend = drawing(Timeline(spans, "predicted"), 72).splitlines()
    assert first == "gpu/compute |" + "F" * 36 + "B" * 35 + "U|"
    assert second == "    gpu/d2h |" + "." * 54 + "<" * 9 + "." * 9 + "|"
    assert legend.split()[0] == "7.2e+04"


def test_many_lanes_are_cut_and_counted():
    made = [Span(Kind.FORWARD, 0, "", i, (compute_lane(f"gpu{i}"),), 0.0, 1.0) for i in range(30)]
    lines = drawing(Timeline(made, "predicted"), 1, most_lanes=4).splitlines()
    assert len(lines) == 6
    assert "26" in lines[4]
