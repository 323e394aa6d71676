from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.breakdown import breakdown, breakdown_by_device
from paceline.core.compare import compare, conform
from paceline.core.plan import Cost, Kind, Plan, Resource, Task
from paceline.core.simulate import simulate
from paceline.core.timeline import Span, Timeline, critical_path, intersection, length, union

COMPUTE, EXCHANGE = Resource("cpu0", "compute"), Resource("cpu0", "exchange")


def span(name: str, kind: Kind, on: Resource, start: float, end: float) -> Span:
    return Span(name, kind, (on,), start, end)


def a_step(start: float, step: int) -> list[Span]:
    """2 s forward, 4 s backward, 3 s of exchange of which 2 lie beside backward, 1 s update."""
    return [
        span(f"s{step}/forward", Kind.FORWARD, COMPUTE, start, start + 2),
        span(f"s{step}/backward", Kind.BACKWARD, COMPUTE, start + 2, start + 6),
        span(f"s{step}/reduce", Kind.REDUCE, EXCHANGE, start + 4, start + 7),
        span(f"s{step}/step", Kind.STEP, COMPUTE, start + 7, start + 8),
    ]


TWO_STEPS = Timeline([*a_step(0, 0), *a_step(9, 1)], "measured")  # and 1 s of nothing between


def test_breakdown_tells_hidden_from_exposed_communication_and_idle_time():
    parts = breakdown(TWO_STEPS)
    assert (parts.load_s, parts.forward_s, parts.backward_s, parts.update_s) == (0, 2, 4, 1)
    assert (parts.hidden_s, parts.exposed_s) == (2, 1)
    assert parts.idle_s == 1
    assert (parts.communication_s, parts.compute_s) == (3, 7)


def test_breakdown_is_the_mean_of_the_devices():
    other = [
        s._replace(name=f"{s.name}'", on=(Resource("cpu1", s.on[0].lane),), end_s=s.end_s)
        for s in TWO_STEPS.spans
        if s.kind is not Kind.REDUCE
    ]
    both = Timeline([*TWO_STEPS.spans, *other], "measured")
    assert set(breakdown_by_device(both)) == {"cpu0", "cpu1"}
    assert breakdown(both).exposed_s == 0.5
    assert breakdown(both).forward_s == 2


def test_a_device_without_updates_has_the_steps_of_the_one_that_updates_for_it():
    other = [
        s._replace(name=f"{s.name}'", on=(Resource("cpu1", s.on[0].lane),))
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
    spans = [span(f"s{i}/step", Kind.STEP, COMPUTE, end - 1, end) for i, end in enumerate(ends)]
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
    return [span(f"{i}", Kind.FORWARD, COMPUTE, a, a + b) for i, (a, b) in enumerate(pairs)]


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
            Task("forward", Kind.FORWARD, (COMPUTE,), Cost(1)),
            Task("backward2", Kind.BACKWARD, (COMPUTE,), Cost(2), ("forward",)),
            Task("reduce2", Kind.REDUCE, (EXCHANGE,), Cost(exchange_s), ("backward2",)),
            Task("backward1", Kind.BACKWARD, (COMPUTE,), Cost(3), ("backward2",)),
            Task("reduce1", Kind.REDUCE, (EXCHANGE,), Cost(1), ("backward1",)),
            Task("step", Kind.STEP, (COMPUTE,), Cost(1), ("reduce1", "reduce2")),
        ]
    )


@pytest.mark.parametrize(
    ("exchange_s", "path"),
    [
        (1, ["forward", "backward2", "backward1", "reduce1", "step"]),
        (9, ["forward", "backward2", "reduce2", "reduce1", "step"]),
    ],
)
def test_the_critical_path_goes_through_what_the_makespan_waits_for(exchange_s, path):
    plan = overlapped(exchange_s)
    timeline = simulate(plan, Flops())
    chain = critical_path(timeline, plan)
    assert [s.name for s in chain] == path
    assert sum(s.duration_s for s in chain) == timeline.makespan_s


def test_compare_puts_the_step_first_and_states_the_error_against_the_right():
    slower = Timeline(
        [s._replace(start_s=2 * s.start_s, end_s=2 * s.end_s) for s in TWO_STEPS.spans], "measured"
    )
    result = compare(Timeline(TWO_STEPS.spans, "predicted"), slower)
    assert (result.left, result.right) == ("predicted", "measured")
    assert (result.step.left_s, result.step.right_s, result.step.error) == (9, 18, -0.5)
    by_name = {row.quantity: row for row in result.rows}
    assert by_name["exposed"].right_s == 2
    assert by_name["load"].error is None


def test_a_simulation_conforms_to_its_plan():
    plan = overlapped(2)
    assert conform(plan, simulate(plan, Flops())) == []


def changed(which: str, **fields: object) -> Timeline:
    spans = simulate(overlapped(2), Flops()).spans
    return Timeline([s._replace(**fields) if s.name == which else s for s in spans], "measured")


@pytest.mark.parametrize(
    ("timeline", "fault"),
    [
        (changed("step", name="stop"), "stop: in the timeline, but not planned"),
        (changed("step", name="stop"), "step: planned, but not in the timeline"),
        (changed("reduce1", start_s=5.5), "reduce1: starts 0.5 s before backward1 ends"),
        (changed("backward1", end_s=7.5), "cpu0/compute: backward1 and step overlap by 0.5 s"),
        (changed("reduce2", name="reduce1"), "1 spans have the name of another"),
    ],
)
def test_conform_names_each_departure(timeline: Timeline, fault: str):
    assert fault in conform(overlapped(2), timeline)


def test_slack_forgives_what_clocks_cannot_tell():
    late = changed("reduce1", start_s=5.9995)
    assert conform(overlapped(2), late)
    assert conform(overlapped(2), late, slack_s=1e-3) == []
