"""Plans, their simulated schedules, and analyses of timelines."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.compare import breakdown, breakdown_by_device, compare, conform
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.simulate import period, schedule, simulate, steady_period
from paceline.core.timeline import Span, Timeline, intersection, length, union

COMPUTE, EXCHANGE = compute_lane("cpu0"), exchange_lane("cpu0")
A, B, C = (Resource(name, Lane.COMPUTE) for name in "abc")


class Flops:
    """Costs of one second per flop."""

    def seconds(self, task: Task) -> float:
        return task.cost.flops


def task(part: str, on: Resource, seconds: float, *after: Task, kind=Kind.FORWARD) -> Task:
    return Task(TaskId(0, kind, part), (on,), Cost(seconds), tuple(one.id for one in after))


ONE, OTHER = task("a", A, 0), task("b", A, 0)


@pytest.mark.parametrize(
    "tasks",
    [
        [task("a", A, 0, OTHER), OTHER],  # waits for a later task
        [task("a", A, 0, ONE)],  # waits for itself
        [ONE, ONE],  # the same name
        [ONE._replace(on=())],  # without resources
    ],
)
def test_an_invalid_plan_is_refused_with_the_task(tasks):
    with pytest.raises(ValueError, match=r"^s0/forward\[a\]: "):
        Plan(tasks)


def test_tasks_of_equal_price_are_priced_once():
    ids = [TaskId(0, Kind.FORWARD), TaskId(0, Kind.FORWARD, "", 1), TaskId(1, Kind.FORWARD)]
    ids += [TaskId(1, Kind.BACKWARD), TaskId(1, Kind.FORWARD, "conv1")]
    cost, other = Cost(1), Cost(2)
    tasks = [Task(one, (COMPUTE,), other if one.worker == 1 else cost) for one in ids]
    sorts, sort_of = Plan(tasks).priced_alike
    assert sort_of == [0, 1, 0, 2, 3]
    assert [task.name for task in sorts] == [tasks[i].name for i in (0, 1, 3, 4)]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, 18))):
        parents = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        on = draw(st.sampled_from([(A,), (B,), (C,), (A, B), (B, C)]))
        # Few distinct durations, including zero, cause ties, which test the order of tasks.
        cost = Cost(float(draw(st.integers(0, 3))))
        after = tuple(tasks[parent].id for parent in sorted(parents))
        tasks.append(Task(TaskId(0, Kind.FORWARD, f"t{i}"), on, cost, after))
    return Plan(tasks)


def naive(plan: Plan) -> tuple[list, list]:
    """Schedule by a full search: of the ready tasks, start the one that was ready first.

    Ties go to the first task in the plan. A task starts when all its resources are free.
    """
    end: dict[TaskId, float] = {}
    start: dict[TaskId, float] = {}
    free: dict[Resource, float] = {}
    left = set(range(len(plan)))
    while True:
        ready = [
            (max((end[name] for name in plan.tasks[i].after), default=0.0), i)
            for i in left
            if all(name in end for name in plan.tasks[i].after)
        ]
        if not ready:
            break
        time, i = min(ready)
        left.remove(i)
        task = plan.tasks[i]
        begin = max([time, *(free.get(resource, 0.0) for resource in task.on)])
        start[task.id], end[task.id] = begin, begin + task.cost.flops
        free |= dict.fromkeys(task.on, end[task.id])
    names = [task.id for task in plan.tasks]
    return [start[name] for name in names], [end[name] for name in names]


@given(plans())
def test_schedules_equal_naive_ones(plan: Plan):
    assert schedule(plan, Flops()) == naive(plan)


def rounds(num_steps: int) -> Plan:
    """Plan two workers on one device: each computes for 3 s, then sends for 4 s."""
    tasks: list[Task] = []
    for step in range(num_steps):
        for worker in range(2):
            after = (TaskId(step - 1, Kind.SEND, "", worker),) if step else ()
            compute = Task(TaskId(step, Kind.STEP, "", worker), (A,), Cost(3), after)
            wire = (Resource(f"lane{worker}", Lane.WIRE),)
            sent = Task(TaskId(step, Kind.SEND, "", worker), wire, Cost(4), (compute.id,))
            tasks += [compute, sent]
    return Plan(tasks)


def test_the_period_of_alternating_workers_is_shorter_than_their_step():
    # A step takes 3 + 4 s, but the device is free after 3 s: two steps in 7 s.
    assert period(rounds, Flops(), 4) == 7
    assert simulate(rounds(1), Flops()).makespan_s == 10
    assert steady_period(simulate(rounds(8), Flops()), 8) == 7
    timeline = simulate(rounds(3), Flops())
    assert [s.end_s for s in timeline.spans if s.kind is Kind.STEP] == [3, 6, 10, 13, 17, 20]
    assert timeline.num_steps() == 6


def span(step: int, kind: Kind, on: Resource, start: float, end: float) -> Span:
    return Span(kind, step, "", 0, (on,), start, end)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([0, 7, 14, 21, 28, 33], 7),  # without the last step, which no other follows
        ([0, 7, 14, 21, 29, 36], None),  # unequal steps
        ([0, 7, 14, 21, 28], None),  # too few without the first
    ],
)
def test_a_period_is_steady_if_steps_repeat(ends, expected):
    spans = [span(i, Kind.STEP, COMPUTE, end - 1, end) for i, end in enumerate(ends)]
    assert steady_period(Timeline(spans, "predicted"), len(ends)) == expected


def a_step(start: float, step: int) -> list[Span]:
    """Return 2 s of forward, 4 of backward, 3 of exchange (2 during backward), 1 of update."""
    return [
        span(step, Kind.FORWARD, COMPUTE, start, start + 2),
        span(step, Kind.BACKWARD, COMPUTE, start + 2, start + 6),
        span(step, Kind.REDUCE, EXCHANGE, start + 4, start + 7),
        span(step, Kind.STEP, COMPUTE, start + 7, start + 8),
    ]


TWO_STEPS = Timeline([*a_step(0, 0), *a_step(9, 1)], "measured")  # with 1 s of idle time between


def elsewhere(without: Kind) -> list[Span]:
    """Return the two steps' spans on a second device, without one kind."""
    return [
        s._replace(worker=1, on=(Resource("cpu1", s.on[0].lane),))
        for s in TWO_STEPS.spans
        if s.kind is not without
    ]


def test_breakdown_tells_hidden_from_exposed_communication_and_idle_time():
    parts = breakdown(TWO_STEPS)
    assert (parts.load_s, parts.forward_s, parts.backward_s, parts.update_s) == (0, 2, 4, 1)
    assert (parts.hidden_s, parts.exposed_s, parts.idle_s) == (2, 1, 1)
    assert parts.compute_s + parts.exposed_s + parts.idle_s == TWO_STEPS.typical_step_s() == 9
    assert (TWO_STEPS.makespan_s, TWO_STEPS.num_steps()) == (17, 2)
    assert TWO_STEPS.utilisation == {COMPUTE: 14 / 17, EXCHANGE: 6 / 17}
    with pytest.raises(ValueError, match="computation"):
        breakdown(Timeline([], "measured"))
    with pytest.raises(ValueError, match="two"):
        Timeline(a_step(0, 0), "measured").typical_step_s()


def test_local_steps_are_a_separate_part_of_the_breakdown():
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
    assert (rows["train"], rows["forward"]) == ((10, 0), (0, 2))
    # Comparisons of other strategies have no row `train`.
    assert "train" not in {row.quantity for row in compare(TWO_STEPS, TWO_STEPS).rows}


def test_a_device_without_updates_has_the_step_limits_of_the_updating_device():
    other = elsewhere(Kind.STEP)
    both = Timeline([*TWO_STEPS.spans, *other], "measured")
    assert both.steps_of("cpu1") == both.steps_of("cpu0") == [(8, 17)]
    parts = breakdown_by_device(both)
    assert set(parts) == {"cpu0", "cpu1"}
    alone = parts["cpu1"]
    assert (alone.backward_s, alone.update_s, alone.idle_s) == (4, 0, 2)
    assert (breakdown(both).update_s, breakdown(both).backward_s) == (0.5, 4)  # the means
    assert Timeline(other, "measured").steps_of("cpu1") == [(0, 16)]


def test_a_core_of_a_host_is_not_in_the_breakdown():
    core = Resource("host/0", Lane.CORE)
    spans = [s._replace(on=(*s.on, core)) if s.kind is Kind.STEP else s for s in TWO_STEPS.spans]
    assert set(breakdown_by_device(Timeline(spans, "measured"))) == {"cpu0"}


def test_a_delayed_step_is_not_typical():
    starts = (0, 9, 18, 77, 86, 95)  # the third step took 50 s longer
    timeline = Timeline([s for i, at in enumerate(starts) for s in a_step(at, i)], "measured")
    assert timeline.typical_step_s() == 9
    assert breakdown(timeline) == breakdown(TWO_STEPS)
    assert Timeline(timeline.spans, "predicted").typical_step_s() == 19


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=12)


@given(intervals, intervals)
def test_unions_and_intersections_equal_those_of_sets_of_seconds(left, right):
    def seconds_in(pairs: Sequence[tuple[int, int]]) -> set[int]:
        return {second for start, duration in pairs for second in range(start, start + duration)}

    one, other = (
        union(span(0, Kind.FORWARD, COMPUTE, a, a + b) for a, b in pairs) for pairs in (left, right)
    )
    assert length(one) == len(seconds_in(left))
    assert all(a[1] < b[0] for a, b in pairwise(one))
    assert length(intersection(one, other)) == len(seconds_in(left) & seconds_in(right))


def test_a_comparison_begins_with_the_step_and_has_errors_relative_to_the_right():
    spans = [s._replace(start_s=2 * s.start_s, end_s=2 * s.end_s) for s in TWO_STEPS.spans]
    result = compare(Timeline(TWO_STEPS.spans, "predicted"), Timeline(spans, "measured"))
    assert (result.left, result.right) == ("predicted", "measured")
    step = result.rows[0]
    assert (step.left_s, step.right_s, step.error) == (9, 18, -0.5)
    by_name = {row.quantity: row for row in result.rows}
    assert (by_name["exposed"].right_s, by_name["load"].error) == (2, None)


FORWARD = task("", COMPUTE, 1)
BACKWARD2 = task("2", COMPUTE, 2, FORWARD, kind=Kind.BACKWARD)
REDUCE2 = task("2", EXCHANGE, 2, BACKWARD2, kind=Kind.REDUCE)
BACKWARD1 = task("1", COMPUTE, 3, BACKWARD2, kind=Kind.BACKWARD)
REDUCE1 = task("1", EXCHANGE, 1, BACKWARD1, kind=Kind.REDUCE)
STEP = task("", COMPUTE, 1, REDUCE1, REDUCE2, kind=Kind.STEP)
OVERLAPPED = Plan([FORWARD, BACKWARD2, REDUCE2, BACKWARD1, REDUCE1, STEP])


def changed(which: str, **fields: object) -> Timeline:
    spans = simulate(OVERLAPPED, Flops()).spans
    return Timeline(
        [s._replace(**fields) if f"{s.kind}{s.part}" == which else s for s in spans], "measured"
    )


@pytest.mark.parametrize(
    ("timeline", "tasks"),
    [
        (changed(""), []),
        (changed("step", step=1), ["s1/step", "s0/step"]),
        (changed("reduce1", start_s=5.5), ["s0/reduce[1]"]),
        (changed("reduce1", start_s=5.9995), ["s0/reduce[1]"]),  # within the slack below
        (changed("backward1", end_s=7.5), ["cpu0/compute", "s0/reduce[1]"]),
        (changed("reduce2", part="1"), ["1 spans"]),
    ],
)
def test_conform_names_each_departure(timeline: Timeline, tasks: list[str]):
    faults = conform(OVERLAPPED, timeline)
    assert bool(faults) is bool(tasks)
    assert all(any(one.startswith(name) for one in faults) for name in tasks)
    assert conform(OVERLAPPED, changed("reduce1", start_s=5.9995), slack_s=1e-3) == []


def test_the_cpu_work_of_messages_is_not_expected_in_recordings():
    sent, handled = TaskId(0, Kind.SEND, "0"), TaskId(0, Kind.SEND, "0 on a")
    wire, cores = Resource("a->b", Lane.WIRE), Resource("a", Lane.MESSAGES)
    planned = Plan([Task(sent, (wire,)), Task(handled, (cores,))])
    recorded = Timeline([Span(Kind.SEND, 0, "0", None, (wire,), 0.0, 1.0)], "measured")
    assert conform(planned, recorded) == []
    (fault,) = conform(planned, Timeline([], "measured"))
    assert fault.startswith("s0/send[0]: ")
