from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.compare import breakdown, breakdown_by_device, compare, conform
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.simulate import simulate
from paceline.core.timeline import Span, Timeline, intersection, length, union

COMPUTE, EXCHANGE = compute_lane("cpu0"), exchange_lane("cpu0")


def span(step: int, kind: Kind, on: Resource, start: float, end: float) -> Span:
    return Span(kind, step, "", 0, (on,), start, end)


def a_step(start: float, step: int) -> list[Span]:
    """2 s forward, 4 s backward, 3 s of exchange of which 2 lie beside backward, 1 s update."""
    return [
        span(step, Kind.FORWARD, COMPUTE, start, start + 2),
        span(step, Kind.BACKWARD, COMPUTE, start + 2, start + 6),
        span(step, Kind.REDUCE, EXCHANGE, start + 4, start + 7),
        span(step, Kind.STEP, COMPUTE, start + 7, start + 8),
    ]


TWO_STEPS = Timeline([*a_step(0, 0), *a_step(9, 1)], "measured")  # and 1 s of nothing between


def test_breakdown_tells_hidden_from_exposed_communication_and_idle_time():
    parts = breakdown(TWO_STEPS)
    assert (parts.load_s, parts.forward_s, parts.backward_s, parts.update_s) == (0, 2, 4, 1)
    assert (parts.hidden_s, parts.exposed_s) == (2, 1)
    assert parts.idle_s == 1
    assert (parts.communication_s, parts.compute_s) == (3, 7)


def test_steps_that_a_worker_takes_by_itself_are_a_part_of_their_own():
    spans = [
        span(0, Kind.STEP, COMPUTE, 0, 1),
        span(1, Kind.TRAIN, COMPUTE, 1, 11),
        span(0, Kind.SEND, EXCHANGE, 8, 14),
        span(1, Kind.STEP, COMPUTE, 14, 15),
    ]
    local = Timeline(spans, "measured")
    parts = breakdown(local)
    assert (parts.train_s, parts.passes_s, parts.compute_s) == (10, 10, 11)
    assert (parts.hidden_s, parts.exposed_s, parts.idle_s) == (3, 3, 0)
    assert parts.divided(2).train_s == 5
    rows = {row.quantity: (row.left_s, row.right_s) for row in compare(local, TWO_STEPS).rows}
    assert rows["train"] == (10, 0)
    assert rows["forward"] == (0, 2)
    # No other strategy's comparison has a row for it.
    assert "train" not in {row.quantity for row in compare(TWO_STEPS, TWO_STEPS).rows}


def test_breakdown_is_the_mean_of_the_devices():
    other = [
        s._replace(worker=1, on=(Resource("cpu1", s.on[0].lane),), end_s=s.end_s)
        for s in TWO_STEPS.spans
        if s.kind is not Kind.REDUCE
    ]
    both = Timeline([*TWO_STEPS.spans, *other], "measured")
    assert set(breakdown_by_device(both)) == {"cpu0", "cpu1"}
    assert breakdown(both).exposed_s == 0.5
    assert breakdown(both).forward_s == 2


def test_a_device_without_updates_has_the_steps_of_the_one_that_updates_for_it():
    other = [
        s._replace(worker=1, on=(Resource("cpu1", s.on[0].lane),))
        for s in TWO_STEPS.spans
        if s.kind is not Kind.STEP
    ]
    both = Timeline([*TWO_STEPS.spans, *other], "measured")
    assert both.steps_of("cpu1") == both.steps_of("cpu0") == [(8, 17)]
    parts = breakdown_by_device(both)["cpu1"]
    assert (parts.backward_s, parts.update_s, parts.idle_s) == (4, 0, 2)
    alone = Timeline(other, "measured")
    assert alone.steps_of("cpu1") == [(0, 16)]


def test_breakdown_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no computation"):
        breakdown(Timeline([], "measured"))


def test_a_step_that_was_held_up_is_not_typical():
    starts = (0, 9, 18, 77, 86, 95)  # the third step took 50 s longer
    timeline = Timeline([s for i, at in enumerate(starts) for s in a_step(at, i)], "measured")
    assert timeline.typical_step_s() == 9
    assert breakdown(timeline) == breakdown(TWO_STEPS)
    assert timeline.period_s() == 19
    assert Timeline(timeline.spans, "predicted").typical_step_s() == 19


def test_the_period_is_the_mean_of_steps_of_different_durations():
    ends = (1, 2, 3, 8, 9, 10, 11, 16, 17)
    spans = [span(i, Kind.STEP, COMPUTE, end - 1, end) for i, end in enumerate(ends)]
    for origin in ("predicted", "measured"):
        assert Timeline(spans, origin).period_s() == 2


def test_the_parts_add_up_to_the_step():
    parts = breakdown(TWO_STEPS)
    assert parts.compute_s + parts.exposed_s + parts.idle_s == TWO_STEPS.period_s()


def test_utilisation_is_the_share_of_the_makespan():
    assert TWO_STEPS.makespan_s == 17
    assert TWO_STEPS.utilisation == {COMPUTE: 14 / 17, EXCHANGE: 6 / 17}


def test_the_period_is_the_time_between_updates():
    assert TWO_STEPS.period_s() == 9
    assert TWO_STEPS.num_steps() == 2
    with pytest.raises(ValueError, match="two weight updates"):
        Timeline(a_step(0, 0), "measured").period_s()


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12)


def spans_of(pairs: list[tuple[int, int]]) -> list[Span]:
    return [span(i, Kind.FORWARD, COMPUTE, a, a + b) for i, (a, b) in enumerate(pairs)]


def seconds_in(pairs: list[tuple[int, int]]) -> set[int]:
    return {second for start, duration in pairs for second in range(start, start + duration)}


@given(intervals, intervals)
def test_unions_and_intersections_equal_those_of_sets_of_seconds(left, right):
    one, other = union(spans_of(left)), union(spans_of(right))
    assert length(one) == len(seconds_in(left))
    assert all(a[1] < b[0] for a, b in pairwise(one))
    assert length(intersection(one, other)) == len(seconds_in(left) & seconds_in(right))


class Flops:
    def seconds(self, task: Task) -> float:
        return task.cost.flops


def overlapped(exchange_s: float) -> Plan:
    return Plan(
        [
            forward := task(Kind.FORWARD, "", COMPUTE, 1),
            backward2 := task(Kind.BACKWARD, "2", COMPUTE, 2, forward),
            reduce2 := task(Kind.REDUCE, "2", EXCHANGE, exchange_s, backward2),
            backward1 := task(Kind.BACKWARD, "1", COMPUTE, 3, backward2),
            reduce1 := task(Kind.REDUCE, "1", EXCHANGE, 1, backward1),
            task(Kind.STEP, "", COMPUTE, 1, reduce1, reduce2),
        ]
    )


def task(kind: Kind, part: str, on: Resource, seconds: float, *after: Task) -> Task:
    return Task(TaskId(0, kind, part), (on,), Cost(seconds), tuple(one.id for one in after))


def label(span: Span) -> str:
    return f"{span.kind}{span.part}"


def test_compare_puts_the_step_first_and_states_the_error_against_the_right():
    slower = Timeline(
        [s._replace(start_s=2 * s.start_s, end_s=2 * s.end_s) for s in TWO_STEPS.spans], "measured"
    )
    result = compare(Timeline(TWO_STEPS.spans, "predicted"), slower)
    assert (result.left, result.right) == ("predicted", "measured")
    step = result.rows[0]
    assert (step.left_s, step.right_s, step.error) == (9, 18, -0.5)
    by_name = {row.quantity: row for row in result.rows}
    assert by_name["exposed"].right_s == 2
    assert by_name["load"].error is None


def test_a_simulation_conforms_to_its_plan():
    plan = overlapped(2)
    assert conform(plan, simulate(plan, Flops())) == []


def changed(which: str, **fields: object) -> Timeline:
    spans = simulate(overlapped(2), Flops()).spans
    return Timeline([s._replace(**fields) if label(s) == which else s for s in spans], "measured")


@pytest.mark.parametrize(
    ("timeline", "fault"),
    [
        (changed("step", step=1), "s1/step: in the timeline, but not planned"),
        (changed("step", step=1), "s0/step: planned, but not in the timeline"),
        (changed("reduce1", start_s=5.5), "s0/reduce[1]: starts 0.5 s before s0/backward[1] ends"),
        (
            changed("backward1", end_s=7.5),
            "cpu0/compute: s0/backward[1] and s0/step overlap",
        ),
        (changed("reduce2", part="1"), "1 spans have the name of another"),
    ],
)
def test_conform_names_each_departure(timeline: Timeline, fault: str):
    assert any(one.startswith(fault) for one in conform(overlapped(2), timeline))


def test_what_cores_do_with_messages_is_recorded_by_nobody():
    sent, handled = TaskId(0, Kind.SEND, "0"), TaskId(0, Kind.SEND, "0 on a")
    wire, cores = Resource("a->b", Lane.WIRE), Resource("a", Lane.MESSAGES)
    planned = Plan([Task(sent, (wire,)), Task(handled, (cores,))])
    recorded = Timeline([Span(Kind.SEND, 0, "0", None, (wire,), 0.0, 1.0)], "measured")
    assert conform(planned, recorded) == []
    assert conform(planned, Timeline([], "measured")) == [
        "s0/send[0]: planned, but not in the timeline"
    ]


def test_slack_forgives_what_clocks_cannot_tell():
    late = changed("reduce1", start_s=5.9995)
    assert conform(overlapped(2), late)
    assert conform(overlapped(2), late, slack_s=1e-3) == []
