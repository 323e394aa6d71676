"""Figures of report pages for hand-made timelines, and the formats of numbers."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from findings import numbers, run_result
from paceline.core.cost import compute_lane, exchange_lane, link_lane
from paceline.core.outcome import Epoch, Updates
from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Span, Timeline
from paceline.report.figures import KINDS, Panel, decades, figure_of, step_parts, whole_numbers
from paceline.report.format import change_text, duration, nbytes, number, share
from paceline.report.page import _environment
from paceline.report.run import learning, worker_sections
from paceline.report.steps import Excerpt, excerpt, steps_in_time, thinned, through_time
from paceline.report.tables import Table

CPU0, CPU1 = compute_lane("cpu0"), compute_lane("cpu1")
EXCHANGE = (link_lane("host", "host"), exchange_lane("cpu0"), exchange_lane("cpu1"))


def window(num_steps: int, part: str = "layer") -> Timeline:
    """Return steps of 10 s on two devices: 5 s forward, 3 s exchange, 2 s update."""
    spans = []
    for step in range(num_steps):
        begin, middle, last, end = (10.0 * step + at for at in (0, 5, 8, 10))
        for worker, lane in enumerate((CPU0, CPU1)):
            spans.append(Span(Kind.FORWARD, step, part, worker, (lane,), begin, middle))
            spans.append(Span(Kind.STEP, step, part, worker, (lane,), last, end))
        spans.append(Span(Kind.REDUCE, step, "0", None, EXCHANGE, middle, last))
    return Timeline(spans, "measured")


def titled(shown: Excerpt, origin: str) -> list[float]:
    """Check the origin in an excerpt's title; return the numbers in the title."""
    assert shown.title.startswith(origin)
    return numbers(shown.title)


def test_timelines_share_one_scale_and_kinds_have_their_colours() -> None:
    slow = window(6)
    fast = Timeline(
        (s._replace(start_s=s.start_s / 2, end_s=s.end_s / 2) for s in slow.spans), "predicted"
    )
    figure = steps_in_time([excerpt(slow), excerpt(fast)])
    layout, bars = figure["layout"], figure["data"]
    assert layout["xaxis2"]["matches"] == "x"
    assert layout["xaxis"]["range"][1] == pytest.approx(20, rel=0.01)
    # The first timeline is above the second.
    assert layout["yaxis2"]["domain"][1] < layout["yaxis"]["domain"][0]
    lasting = {(bar["xaxis"], bar["name"]): {round(s, 6) for s in bar["x"]} for bar in bars}
    assert lasting["x", "forward"] == {5}
    assert lasting["x2", "forward"] == {2.5}
    assert lasting["x", "reduce"] == {3}
    kinds = [KINDS[kind] for kind in (Kind.FORWARD, Kind.REDUCE, Kind.STEP)]
    colours = {bar["name"]: bar["marker"]["color"] for bar in bars}
    assert colours == {one.label: one.colour for one in kinds}


def test_hover_texts_have_escaped_names_and_durations() -> None:
    figure = steps_in_time([excerpt(window(6, "<a href='x'>"))])
    assert "s2/forward[&lt;a href='x'&gt;]@worker0<br>5.00 s" in figure["data"][0]["customdata"]
    span = Span(Kind.STEP, 0, "", None, (compute_lane("<b>cpu"),), 0.0, 1.0)
    (bar,) = steps_in_time([excerpt(Timeline([span], "measured"))])["data"]
    assert bar["y"] == ["&lt;b&gt;cpu/compute"]


def assert_whole_ticks(axis: dict[str, Any], highest: int) -> None:
    """Assert few ticks, all at whole numbers, for any range that plotly chooses."""
    assert (axis["tickmode"], axis["tick0"]) == ("linear", 0)
    assert axis["dtick"] == int(axis["dtick"]) >= 1
    assert highest / axis["dtick"] <= 8


def test_learning_curves_count_epochs_from_one() -> None:
    epochs = [
        Epoch(number=i, train_loss=3 - i, test_loss=4 - i, score=i / 2, seconds=1) for i in range(2)
    ]
    drawn = learning(epochs, "accuracy")["figure"]["data"]
    lines = {line["name"]: (line["x"], line["y"]) for line in drawn}
    assert lines == {
        "train loss": ([1, 2], [3, 2]),
        "test loss": ([1, 2], [4, 3]),
        "test accuracy": ([1, 2], [0, 0.5]),
    }
    unscored = [replace(one, score=None) for one in epochs]
    assert [line["name"] for line in learning(unscored, "")["figure"]["data"]] == list(lines)[:2]


def test_parts_stack_up_and_hidden_communication_overlaps_backward() -> None:
    seconds = {"step": 10, "load": 1, "forward": 2, "backward": 3, "update": 0.5}
    seconds |= {"hidden": 2.5, "exposed": 1.5, "idle": 2}
    figure = step_parts({"once": seconds, "twice": {q: 2 * s for q, s in seconds.items()}})
    ends = {bar["name"]: (bar["base"][1], bar["x"][1]) for bar in figure["data"]}
    placed = {name: (start, start + length) for name, (start, length) in ends.items()}
    assert placed == {
        "load": (0, 2),
        "forward": (2, 6),
        "backward": (6, 12),
        "hidden communication": (7, 12),
        "exposed communication": (12, 15),
        "weight update": (15, 16),
        "idle": (16, 20),
    }


def test_an_excerpt_is_two_steps_from_the_middle_and_starts_at_zero() -> None:
    shown = excerpt(window(6))
    assert titled(shown, "measured") == [2, 6]
    assert (shown.length_s, list(shown.step_ends_s)) == (20, [10, 20])
    track = shown.rows[CPU0]
    assert (track[0].start_s, {span.step for span in track}) == (0, {2, 3})
    # Lanes of a device are adjacent, and links come last.
    assert [str(resource) for resource in shown.rows] == [
        *("cpu0/compute", "cpu0/exchange", "cpu1/compute", "cpu1/exchange", "host->host/wire"),
    ]


def updates(lane: Resource, count: int, worker: int = 0, every_s: float = 1, lasts_s: float = 1):
    """Return a worker's updates: one begins every `every_s` seconds."""
    starts = [every_s * i for i in range(count)]
    return [Span(Kind.STEP, i, "", worker, (lane,), s, s + lasts_s) for i, s in enumerate(starts)]


def test_an_excerpt_follows_the_device_that_updates_most_often() -> None:
    spans = updates(CPU0, 9, lasts_s=0.5) + updates(CPU1, 2, 1, every_s=4, lasts_s=4)
    shown = excerpt(Timeline(spans, "measured"))
    assert (titled(shown, "measured"), shown.length_s) == ([2, 9], 2)
    # The excerpt is from 3.5 s to 5.5 s: both slow steps overlap it and are clipped to it.
    assert [span.step for span in shown.rows[CPU1]] == [0, 1]
    (bars,) = steps_in_time([shown])["data"]
    placed = zip(bars["y"], bars["base"], bars["x"], strict=True)
    drawn = [(base, base + length) for row, base, length in placed if row == "cpu1/compute"]
    assert drawn == [(0, 0.5), (0.5, 2)]


@pytest.mark.parametrize("num_updates", [0, 1])
def test_an_excerpt_is_the_whole_timeline_if_no_step_repeats(num_updates: int) -> None:
    spans = [Span(Kind.FORWARD, 0, "", 0, (CPU0,), -1.0, 0.0)]
    spans += updates(CPU0, num_updates, lasts_s=2)
    shown = excerpt(Timeline(spans, "measured"))
    assert titled(shown, "measured") == []
    assert (shown.length_s, shown.rows[CPU0][0].start_s) == (1 + 2 * num_updates, 0)
    assert titled(excerpt(Timeline(updates(CPU0, 2), "measured")), "measured") == [1, 2]


def test_an_excerpt_of_many_rows_is_cut_to_40_and_has_both_counts_in_its_title() -> None:
    spans = [span for i in range(50) for span in updates(compute_lane(f"gpu{i}"), 4, i)]
    shown = excerpt(Timeline(spans, "predicted"))
    assert (titled(shown, "predicted"), len(shown.rows)) == ([2, 4, 40, 50], 40)


@pytest.mark.parametrize(("count", "most"), [(10, 10), (11, 10), (1000, 7), (3, 10)])
def test_thinning_keeps_the_slowest_and_where_it_was(count: int, most: int) -> None:
    values = [float(i % 13) for i in range(count)]
    slowest = count // 2
    values[slowest] = 99.0
    numbers, longest = thinned(values, most)
    assert len(numbers) == len(longest) <= most
    assert numbers == sorted(set(numbers))
    assert [values[number - 1] for number in numbers] == longest
    assert (slowest + 1, 99.0) in zip(numbers, longest, strict=True)


def test_step_times_are_drawn_of_measured_timelines_only() -> None:
    assert window(1).steps() == {}
    measured = window(9)
    predicted = Timeline(measured.spans, "predicted")
    (drawn,) = through_time([measured, predicted])
    assert [drawn[key] for key in ("origin", "median_s", "longest_s")] == ["measured", 10, 10]
    assert list(through_time([predicted, window(3)])) == []


@given(st.integers(1, 10**7))
def test_counts_have_few_ticks_and_all_at_whole_numbers(highest: int) -> None:
    assert_whole_ticks(whole_numbers(highest), highest)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1))
def test_a_logarithmic_axis_names_each_decade(values: list[float]) -> None:
    axis = decades(values)
    low, high = (10**end for end in axis["range"])
    assert low <= min(values) <= max(values) <= high
    inside = [10.0**power for power in range(-4, 8) if min(values) <= 10.0**power <= max(values)]
    assert all(pytest.approx(decade) in axis["tickvals"] for decade in inside)
    assert axis["tickvals"]


@pytest.mark.parametrize("most", [0, 40])
def test_updates_ahead_are_sorted_by_time_and_have_ticks_at_whole_numbers(most: int) -> None:
    # Workers record updates in turns, so the entries are not sorted by time.
    gaps = ((1.0, 0), (3.0, most), (2.5, 0), (4.0, 0))
    figure = worker_sections(run_result(updates=Updates(4, {}, {}, 0.5, gaps)))["gaps"]
    assert figure["data"][0]["x"] == (1.0, 2.5, 3.0, 4.0)
    assert_whole_ticks(figure["layout"]["yaxis"], most)


def part(name: str, *values: object) -> str:
    """Render a macro of the template parts.html."""
    template = _environment().get_template("parts.html")
    return str(getattr(template.module, name)(*values))


def test_a_figure_has_null_for_nan_and_escapes_text() -> None:
    drawn = figure_of([Panel([{"type": "scatter", "y": [1.0, NAN, "</script>"]}])], 100)
    (described,) = re.findall(r'application/json">(.+?)</script>', part("figure", drawn, "curve"))
    assert json.loads(described)["data"][0]["y"] == [1.0, None, "</script>"]


SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
NAN, INF = float("nan"), float("inf")
SHOWN = {
    duration: [
        *((0, "0 s"), (2.2e-19, "0 s"), (999.4e-9, "999 ns"), (999.6e-9, "1.00 us")),
        *((0.9996, "1.00 s"), (-0.25, "-250 ms"), (99.9, "99.9 s"), (99.96, "1 min 40 s")),
        *((5999.6, "1 h 40 min"), (7500, "2 h 5 min"), (NAN, "nan")),
    ],
    nbytes: [
        *((0, "0 B"), (1000, "1000 B"), (10.5, "10.5 B"), (1023.7, "1.00 KiB")),
        *((1023.6 * 1024, "1.00 MiB"), (-2048, "-2.00 KiB"), (INF, "inf")),
    ],
    number: [(0, "0"), (NAN, "nan"), (0.1234, "0.123"), (99.96, "100"), (12345.6, "12,346")],
    share: [(0.1234, "12.3 %"), (-0.0001, "0.0 %"), (NAN, "nan")],
    lambda value: share(value, 2): [(0.97222, "97.22 %")],
    partial(share, signed=True): [(0.05, "+5.0 %"), (-0.05, "-5.0 %"), (12.5, "+1,250.0 %")],
    change_text: [(0.333, "+33.3 %"), (8.9, "+890.0 %"), (252.983, "254 times"), (None, "-")],
}


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [(function, *row) for function, rows in SHOWN.items() for row in rows],
)
def test_numbers_are_shown_as(function, value, text: str) -> None:
    assert function(value) == text


@given(st.floats(1e-9, 1e9))
@example(59.999)
@example(5999.5)
def test_duration_is_within_half_a_percent_in_three_digits(seconds: float) -> None:
    words = duration(seconds).replace(",", "").split()
    parts = zip(words[::2], words[1::2], strict=True)
    read = sum(float(value) * SECONDS[unit] for value, unit in parts)
    assert read == pytest.approx(seconds, rel=0.00501)
    assert seconds >= 99 or (words[0].replace(".", "").isdigit() and len(words[0]) <= 4)


def test_a_column_has_exact_numbers_below_one_unit_or_none() -> None:
    rows = [("a", duration(1 / 3), nbytes(5), "-"), ("b", duration(2e-6), duration(5), share(0.5))]
    drawn = part("table", Table(("name", "time", "mixed", "part"), rows))
    for cell in (
        '<th class="number" data-unit="s">time</th>',
        '<td class="number" data-value="0.333333333333">333 ms</td>',
        '<td class="number" data-value="2e-06">2.00 us</td>',
        *('<th class="number">mixed</th>', '<td class="number">5 B</td>'),
        *('<td class="number">-</td>', '<td class="number" data-value="50">50.0 %</td>'),
    ):
        assert cell in drawn
