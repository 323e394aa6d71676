"""What pages show: bars, curves and axes of timelines made by hand, and numbers as text."""

import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from findings import numbers
from paceline.core.compare import Comparison, ComparisonRow
from paceline.core.cost import compute_lane, exchange_lane, link_lane
from paceline.core.outcome import Epoch, Updates
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline
from paceline.report.figures import KINDS, decades, learning_curves, step_parts, whole_numbers
from paceline.report.format import Quantity, change_text, duration, nbytes, number, share
from paceline.report.markup import table
from paceline.report.side_by_side import Point, Side, SideBySide
from paceline.report.side_by_side_page import drawn
from paceline.report.steps import Excerpt, excerpt, steps_in_time, thinned, through_time
from paceline.report.workers import _updates

CPU0, CPU1 = compute_lane("cpu0"), compute_lane("cpu1")
EXCHANGE = (link_lane("host", "host"), exchange_lane("cpu0"), exchange_lane("cpu1"))


def window(num_steps: int, part: str = "layer") -> Timeline:
    """Return steps of 10 s on two devices: 5 s forward, 3 s exchange, 2 s update."""
    spans = []
    for step in range(num_steps):
        begin = 10.0 * step
        for worker, lane in enumerate((CPU0, CPU1)):
            for kind, start, end in ((Kind.FORWARD, 0, 5), (Kind.STEP, 8, 10)):
                spans.append(Span(kind, step, part, worker, (lane,), begin + start, begin + end))
        spans.append(Span(Kind.REDUCE, step, "0", None, EXCHANGE, begin + 5, begin + 8))
    return Timeline(spans, "measured")


def titled(shown: Excerpt, origin: str) -> list[float]:
    """Return the counts in the title of an excerpt from such a timeline."""
    assert shown.title.startswith(origin)
    return numbers(shown.title)


class TestStepsInTime:
    def test_shows_all_timelines_on_one_scale(self) -> None:
        slow = window(6)
        fast = Timeline(
            (s._replace(start_s=s.start_s / 2, end_s=s.end_s / 2) for s in slow.spans), "predicted"
        )
        figure = steps_in_time([excerpt(slow), excerpt(fast)])
        assert figure.layout.xaxis.matches == "x2" or figure.layout.xaxis2.matches == "x"
        assert figure.layout.xaxis.range[1] == pytest.approx(20, rel=0.01)
        lasting = {
            (bar.xaxis, bar.name): {round(length, 6) for length in bar.x} for bar in figure.data
        }
        assert lasting["x", "forward"] == {5}
        assert lasting["x2", "forward"] == {2.5}
        assert lasting["x", "reduce"] == {3}

    def test_names_each_kind_once_and_draws_it_in_its_colour(self) -> None:
        figure = steps_in_time([excerpt(window(6)), excerpt(window(4))])
        kinds = [KINDS[kind] for kind in (Kind.FORWARD, Kind.REDUCE, Kind.STEP)]
        assert [bar.name for bar in figure.data if bar.showlegend] == [one.label for one in kinds]
        colours = {bar.name: bar.marker.color for bar in figure.data}
        assert colours == {one.label: one.colour for one in kinds}

    def test_tells_names_and_durations_without_markup(self) -> None:
        figure = steps_in_time([excerpt(window(6))])
        assert "s2/forward[layer]@worker1<br>5.00 s" in figure.data[0].customdata
        figure = steps_in_time([excerpt(window(6, "<a href='x'>"))])
        assert "s2/forward[&lt;a href='x'&gt;]@worker0<br>5.00 s" in figure.data[0].customdata
        lane = compute_lane("<b>cpu")
        span = Span(Kind.STEP, 0, "", None, (lane,), 0.0, 1.0)
        (bar,) = steps_in_time([excerpt(Timeline([span], "measured"))]).data
        assert bar.y == ("&lt;b&gt;cpu/compute",)


def figures_of(page: str) -> list[dict[str, Any]]:
    """What plotly draws on a page."""
    return [json.loads(one) for one in re.findall(r'application/json">(.+?)</script>', page)]


def assert_whole_ticks(axis: dict[str, Any], highest: int) -> None:
    """Few ticks, and all at whole numbers, whatever the range that plotly chooses."""
    assert (axis["tickmode"], axis["tick0"]) == ("linear", 0)
    assert axis["dtick"] == int(axis["dtick"]) >= 1
    assert highest / axis["dtick"] <= 8


def test_learning_curves_count_epochs_from_one() -> None:
    epochs = [
        Epoch(number=i, train_loss=3 - i, test_loss=4 - i, score=i / 2, seconds=1) for i in range(2)
    ]
    lines = {line.name: (line.x, line.y) for line in learning_curves(epochs, "accuracy").data}
    assert lines == {
        "train loss": ((1, 2), (3, 2)),
        "test loss": ((1, 2), (4, 3)),
        "test accuracy": ((1, 2), (0, 0.5)),
    }
    unscored = [replace(one, score=None) for one in epochs]
    assert [line.name for line in learning_curves(unscored, "").data] == list(lines)[:2]


class TestStepParts:
    def test_stack_up_to_the_sum_of_what_is_not_hidden(self) -> None:
        seconds = {"step": 10, "load": 1, "forward": 2, "backward": 3, "update": 0.5}
        seconds |= {"hidden": 2.5, "exposed": 1.5, "idle": 2}
        rows = tuple(
            ComparisonRow(quantity=q, left_s=s, right_s=2 * s, error=-0.5)
            for q, s in seconds.items()
        )
        figure = step_parts(Comparison(left="predicted", right="measured", rows=rows))
        placed = {bar.name: (bar.base[1], bar.base[1] + bar.x[1]) for bar in figure.data}
        assert placed == {
            "load": (0, 2),
            "forward": (2, 6),
            "backward": (6, 12),
            "hidden communication": (7, 12),
            "exposed communication": (12, 15),
            "weight update": (15, 16),
            "idle": (16, 20),
        }


class TestExcerpt:
    def test_is_two_steps_from_the_middle_and_starts_at_zero(self) -> None:
        measured = window(6)
        shown = excerpt(measured)
        assert titled(shown, "measured") == [2, 6]
        assert shown.length_s == 2 * measured.period_s() == 20
        assert list(shown.step_ends_s) == [10, 20]
        track = shown.rows[CPU0]
        assert track[0].start_s == 0
        assert {span.step for span in track} == {2, 3}

        # Lanes of a device stand together, and links last.
        assert [str(resource) for resource in shown.rows] == [
            *("cpu0/compute", "cpu0/exchange", "cpu1/compute", "cpu1/exchange"),
            "host->host/wire",
        ]

    def test_follows_the_device_that_updates_most_often(self) -> None:
        fast, slow = compute_lane("gpu"), compute_lane("cpu")
        spans = [Span(Kind.STEP, i, "", 0, (fast,), i, i + 0.5) for i in range(9)]
        spans += [Span(Kind.STEP, i, "", 1, (slow,), 4 * i, 4 * i + 4) for i in range(2)]
        shown = excerpt(Timeline(spans, "measured"))
        assert titled(shown, "measured") == [2, 9]
        assert shown.length_s == 2
        # It runs from 3.5 to 5.5: both slow steps reach into it, and are drawn up to its ends.
        assert [span.step for span in shown.rows[slow]] == [0, 1]
        (bars,) = steps_in_time([shown]).data
        drawn = [
            (base, base + length)
            for base, length, row in zip(bars.base, bars.x, bars.y, strict=True)
            if row == "cpu/compute"
        ]
        assert drawn == [(0, 0.5), (0.5, 2)]

    @pytest.mark.parametrize("num_updates", [0, 1])
    def test_is_everything_where_no_step_repeats(self, num_updates: int) -> None:
        lane = compute_lane("cpu")
        spans = [Span(Kind.FORWARD, 0, "", 0, (lane,), 5.0, 6.0)]
        spans += [Span(Kind.STEP, i, "", 0, (lane,), 6.0, 8.0) for i in range(num_updates)]
        shown = excerpt(Timeline(spans, "measured"))
        assert titled(shown, "measured") == []
        assert (shown.length_s, shown.rows[lane][0].start_s) == (1 + 2 * num_updates, 0)
        two = [Span(Kind.STEP, i, "", 0, (lane,), i, i + 1.0) for i in range(2)]
        assert titled(excerpt(Timeline(two, "measured")), "measured") == [1, 2]


class TestThroughTime:
    def test_steps_are_counted_from_update_to_update(self) -> None:
        steps = window(4).steps()
        assert steps.keys() == {"cpu0", "cpu1"}
        assert all([end - start for start, end in of] == [10, 10, 10] for of in steps.values())
        assert window(1).steps() == {}

    @pytest.mark.parametrize(("count", "most"), [(10, 10), (11, 10), (1000, 7), (3, 10)])
    def test_thinning_keeps_the_slowest_and_where_it_was(self, count: int, most: int) -> None:
        values = [float(i % 13) for i in range(count)]
        slowest = count // 2
        values[slowest] = 99.0
        numbers, longest = thinned(values, most)
        assert len(numbers) == len(longest) <= most
        assert numbers == sorted(set(numbers))
        assert [values[number - 1] for number in numbers] == longest
        assert (slowest + 1, 99.0) in zip(numbers, longest, strict=True)

    def test_shows_what_happened_and_not_what_was_predicted(self) -> None:
        measured = window(9)
        predicted = Timeline(measured.spans, "predicted")
        (drawn,) = through_time([measured, predicted])
        assert "predicted" not in drawn
        assert drawn.count("10.0 s") >= 2  # the median and the longest
        assert list(through_time([predicted, window(3)])) == []


def test_a_timeline_of_many_rows_is_cut_and_says_so() -> None:
    spans = [
        Span(Kind.STEP, step, "", i, (compute_lane(f"gpu{i}"),), step, step + 1)
        for step in range(4)
        for i in range(50)
    ]
    shown = excerpt(Timeline(spans, "predicted"))
    assert titled(shown, "predicted") == [2, 4, 40, 50]
    assert len(shown.rows) == 40


class TestAxes:
    @given(st.integers(1, 10**7))
    def test_counts_have_few_ticks_and_all_at_whole_numbers(self, highest: int) -> None:
        assert_whole_ticks(whole_numbers(highest), highest)

    @given(st.lists(st.floats(1e-3, 1e6), min_size=1))
    def test_a_logarithmic_axis_names_each_decade(self, values: list[float]) -> None:
        axis = decades(values)
        low, high = (10**end for end in axis["range"])
        assert low <= min(values) <= max(values) <= high
        inside = [
            10.0**power for power in range(-4, 8) if min(values) <= 10.0**power <= max(values)
        ]
        assert all(pytest.approx(decade) in axis["tickvals"] for decade in inside)
        assert axis["tickvals"]


def test_no_line_runs_backwards_in_time() -> None:
    # As workers write their updates down: in turns, and not in the order of their clocks.
    gaps = ((1.0, 1), (3.0, 2), (2.5, 1), (4.0, 0))
    (figure,) = figures_of(_updates(Updates(4, {}, {}, 0.5, gaps), ()))
    assert figure["data"][0]["x"] == [1.0, 2.5, 3.0, 4.0]


@pytest.mark.parametrize("most", [0, 1, 3, 40])
def test_updates_ahead_are_ticked_at_whole_numbers(most: int) -> None:
    made = Updates(4, {}, {}, 0.5, ((1.0, 0), (2.0, most)))
    assert_whole_ticks(figures_of(_updates(made, ()))[0]["layout"]["yaxis"], most)


@pytest.mark.parametrize("num_epochs", [1, 3, 40])
def test_epochs_of_runs_beside_each_other_are_ticked_once(num_epochs: int) -> None:
    points = tuple(Point(epoch=n, seconds=float(n), loss=1.0) for n in range(1, num_epochs + 1))
    one = Side(
        name="one", differs="", points=points, samples_per_s=1, reached_s=1, num_updates=None
    )
    runs = (one, one.model_copy(update={"name": "other"}))
    sides = SideBySide(loss="test loss", lowest=1.0, reached=1.0, runs=runs)
    _, sections = drawn(sides)
    assert_whole_ticks(figures_of("".join(sections))[0]["layout"]["xaxis2"], num_epochs)


SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {unit: 1024.0**i for i, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))}


def parsed(text: str, units: dict[str, float]) -> float:
    """Read "2 h 5 min" back: pairs of a number and a unit."""
    words = text.replace(",", "").split()
    return sum(
        float(value) * units[unit] for value, unit in zip(words[::2], words[1::2], strict=True)
    )


NAN, INF = float("nan"), float("inf")
SHOWN = {
    duration: [
        *((0, "0 s"), (2.2e-19, "0 s"), (1.5e-9, "1.50 ns"), (999.4e-9, "999 ns")),
        *((999.6e-9, "1.00 us"), (0.0123456, "12.3 ms"), (0.9996, "1.00 s"), (-0.25, "-250 ms")),
        *((99.9, "99.9 s"), (99.96, "1 min 40 s"), (200, "3 min 20 s"), (5999.6, "1 h 40 min")),
        *((7500, "2 h 5 min"), (NAN, "nan")),
    ],
    nbytes: [
        *((0, "0 B"), (1000, "1000 B"), (10.5, "10.5 B"), (1023.7, "1.00 KiB"), (1536, "1.50 KiB")),
        *((1023.6 * 1024, "1.00 MiB"), (-2048, "-2.00 KiB"), (243e6, "232 MiB"), (INF, "inf")),
    ],
    number: [
        *((0, "0"), (NAN, "nan"), (0.1234, "0.123"), (12.34, "12.3"), (99.96, "100")),
        (12345.6, "12,346"),
    ],
    share: [(0.1234, "12.3 %"), (-0.0001, "0.0 %"), (NAN, "nan")],
    lambda value: share(value, 2): [(0.97222, "97.22 %")],
    partial(share, signed=True): [(0.05, "+5.0 %"), (-0.05, "-5.0 %"), (12.5, "+1,250.0 %")],
    change_text: [
        *((0.333, "+33.3 %"), (-1, "-100.0 %"), (8.9, "+890.0 %")),
        *((252.983, "254 times"), (None, "-")),  # from tenfold
    ],
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
    assert parsed(duration(seconds), SECONDS) == pytest.approx(seconds, rel=0.00501)
    digits = duration(seconds).split()[0]
    assert seconds >= 99 or (digits.replace(".", "").isdigit() and len(digits) <= 4)


@given(st.floats(1, 1e17) | st.integers(1, 2**60) | st.integers(0, 1023))
def test_nbytes_is_within_half_a_percent(count: float) -> None:
    assert parsed(nbytes(count), BYTES) == pytest.approx(count, rel=0.00501)
    if count < 1024 and isinstance(count, int):
        assert nbytes(count) == f"{count} B"


@pytest.mark.parametrize(
    ("shown", "value", "unit"),
    [
        (duration(0.0123456789), 0.0123456789, "s"),
        (nbytes(1536), 1536, "bytes"),
        (share(-0.125), -12.5, "%"),
        (number(12345.678), 12345.678, ""),
    ],
)
def test_what_is_read_knows_the_exact_number(shown: Quantity, value: float, unit: str) -> None:
    assert (shown.value, shown.unit) == (pytest.approx(value), unit)
    assert type(f"{shown}") is str


def test_a_column_has_exact_numbers_below_one_unit_or_none() -> None:
    rows = [("a", duration(1 / 3), nbytes(5), "-"), ("b", duration(2e-6), duration(5), share(0.5))]
    drawn = table(("name", "time", "mixed", "part"), rows)
    assert '<th class="number" data-unit="s">time</th>' in drawn
    assert '<td class="number" data-value="0.333333333333">333 ms</td>' in drawn
    assert '<td class="number" data-value="2e-06">2.00 us</td>' in drawn
    assert '<th class="number">mixed</th>' in drawn
    assert '<td class="number">5 B</td>' in drawn
    assert '<td class="number">-</td>' in drawn
    assert '<td class="number" data-value="50">50.0 %</td>' in drawn
