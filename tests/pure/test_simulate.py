from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.simulate import period, schedule, simulate


def lane(name: str) -> Resource:
    return Resource(name, Lane.COMPUTE)


@dataclass(frozen=True)
class Flops:
    """One second for each flop."""

    def seconds(self, task: Task) -> float:
        return task.cost.flops


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, list[float]]:
    num_tasks = draw(st.integers(1, 25))
    lanes = [lane(name) for name in "abc"]
    tasks, seconds = [], []
    for i in range(num_tasks):
        parents = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        on = draw(st.lists(st.sampled_from(lanes), min_size=1, max_size=2, unique=True))
        # Few distinct durations, zero among them: ties are what the order is about.
        seconds.append(float(draw(st.integers(0, 3))))
        after = tuple(tasks[parent].id for parent in sorted(parents))
        tasks.append(Task(TaskId(0, Kind.FORWARD, f"t{i}"), tuple(on), Cost(seconds[-1]), after))
    return Plan(tasks), seconds


def naive(plan: Plan, seconds: Sequence[float], until: float = inf) -> tuple[list, list]:
    """Look at all tasks for each decision: of the ready ones take the one that became ready first,
    then the first in the plan; start it when all its resources are free."""
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
        if begin >= until:
            continue
        start[task.id], end[task.id] = begin, begin + seconds[i]
        for resource in task.on:
            free[resource] = end[task.id]
    names = [task.id for task in plan.tasks]
    return [start.get(name) for name in names], [end.get(name, inf) for name in names]


@given(plans())
def test_schedule_equals_a_naive_one(case: tuple[Plan, list[float]]):
    plan, seconds = case
    assert schedule(plan, Flops()) == naive(plan, seconds)


@given(plans(), st.integers(1, 12))
def test_schedule_with_a_horizon_equals_a_naive_one(case: tuple[Plan, list[float]], until: int):
    plan, seconds = case
    start, end = schedule(plan, Flops(), until)
    expected_start, expected_end = naive(plan, seconds, until)
    assert end == expected_end
    assert [a for a, b in zip(start, end, strict=True) if b < inf] == [
        a for a in expected_start if a is not None
    ]


@given(plans())
def test_no_child_starts_before_its_parents_end_and_no_resource_is_shared(
    case: tuple[Plan, list[float]],
):
    plan, _ = case
    timeline = simulate(plan, Flops())
    spans = {span.id: span for span in timeline.spans}
    for task in plan.tasks:
        assert all(spans[task.id].start_s >= spans[before].end_s for before in task.after)
    for track in timeline.tracks.values():
        assert all(a.end_s <= b.start_s for a, b in pairwise(track))


def task(part: str, on: Resource, seconds: float, *after: Task) -> Task:
    return Task(TaskId(0, Kind.FORWARD, part), (on,), Cost(seconds), tuple(t.id for t in after))


def test_a_chain_takes_the_sum_and_a_fan_the_longest():
    a, b, c = lane("a"), lane("b"), lane("c")
    plan = Plan(
        [
            root := task("root", a, 1),
            left := task("left", a, 2, root),
            middle := task("middle", b, 5, root),
            right := task("right", c, 3, root),
            task("join", a, 1, left, middle, right),
        ]
    )
    assert simulate(plan, Flops()).makespan_s == 1 + 5 + 1


def test_ready_tasks_are_served_first_in_first_out_and_ties_in_issue_order():
    a, b = lane("a"), lane("b")
    plan = Plan(
        [
            task("long", a, 4),
            early := task("early", b, 1),
            late := task("late", b, 1),
            task("second", a, 1, late),
            task("first", a, 1, early),
            task("third", a, 1, late),
        ]
    )
    order = sorted(simulate(plan, Flops()).spans, key=lambda span: span.start_s)
    on_a = [span.part for span in order if a in span.on]
    assert on_a == ["long", "first", "second", "third"]


def rounds(num_steps: int) -> Plan:
    """Two lanes of a device take turns: 3 s of work on it, then 4 s of exchange beside it."""
    device = lane("gpu0")
    tasks: list[Task] = []
    for step in range(num_steps):
        for worker in range(2):
            after = (TaskId(step - 1, Kind.SEND, "", worker),) if step else ()
            compute = Task(TaskId(step, Kind.STEP, "", worker), (device,), Cost(3), after)
            wire = (Resource(f"lane{worker}", Lane.WIRE),)
            tasks += [
                compute,
                Task(TaskId(step, Kind.SEND, "", worker), wire, Cost(4), (compute.id,)),
            ]
    return Plan(tasks)


def test_the_period_of_alternating_workers_is_shorter_than_their_step():
    # Each needs 3 + 4 s for a step, but the device is free again after 3: two steps in 7 s.
    assert period(rounds, Flops(), 4) == 7
    assert simulate(rounds(1), Flops()).makespan_s == 10


def test_until_counts_what_was_done_by_the_horizon():
    timeline = simulate(rounds(10), Flops(), until=20)
    # Work ends at 3, 6, 10, 13, 17, 20.
    assert [s.end_s for s in timeline.spans if s.kind is Kind.STEP] == [3, 6, 10, 13, 17, 20]
    assert timeline.num_steps() == 6


def test_a_plan_that_ends_before_the_horizon_is_refused():
    with pytest.raises(ValueError, match="the plan ends after 10 s, before the horizon of 20 s"):
        simulate(rounds(1), Flops(), until=20)


def test_an_empty_plan_takes_no_time():
    assert simulate(Plan([]), Flops()).makespan_s == 0


def test_the_same_plan_gives_the_same_timeline():
    assert simulate(rounds(5), Flops()).spans == simulate(rounds(5), Flops()).spans
