"""What the figures of pages draw: bars, curves and axes, against timelines made by hand."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from findings import numbers
from paceline.core.compare import Comparison, ComparisonRow
from paceline.core.cost import compute_lane, exchange_lane, link_lane
from paceline.core.outcome import Epoch, Updates
from paceline.core.plan import Kind
from paceline.core.timeline import Span, Timeline
from paceline.report.figures import KINDS, decades, learning_curves, step_parts, whole_numbers
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
