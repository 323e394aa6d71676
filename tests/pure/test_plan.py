"""Plans: names, order, prices, and steps that repeat."""

from collections.abc import Iterator

import pytest

from paceline.core.cost import compute_lane
from paceline.core.plan import Cost, Kind, Plan, Task, TaskId

LANE = (compute_lane("cpu0"),)


def task(part: str, *after: str) -> Task:
    waits = tuple(TaskId(0, Kind.FORWARD, one) for one in after)
    return Task(TaskId(0, Kind.FORWARD, part), LANE, after=waits)


def test_tasks_have_the_names_that_recordings_use_and_are_found_by_them():
    assert TaskId(0, Kind.FORWARD, "conv1", 1).name == "s0/forward[conv1]@worker1"
    assert TaskId(3, Kind.STEP, worker=0).name == "s3/step@worker0"
    assert TaskId(2, Kind.REDUCE, "1").name == "s2/reduce[1]"
    assert TaskId(2, Kind.SEND, "fc1", None, 3).name == "s2/send[fc1/3]"
    task = Task(TaskId(2, Kind.SEND, "fc1", 1, 3), LANE)
    assert (task.kind, task.part, task.sub_batch) == (Kind.SEND, "fc1", 3)
    assert Plan([task])["s2/send[fc1/3]@worker1"] is task
    assert Task(task.id, LANE, Cost()) == task


@pytest.mark.parametrize(
    "tasks",
    [
        [task("a", "b"), task("b")],  # waits for a later one
        [task("a", "a")],  # for itself
        [task("a"), task("a")],  # the same name
        [Task(TaskId(0, Kind.FORWARD, "a"), ())],  # on nothing
    ],
)
def test_what_is_no_plan_is_refused_with_the_task(tasks):
    with pytest.raises(ValueError, match=r"^s0/forward\[a\]: "):
        Plan(tasks)


def test_work_cannot_be_negative():
    with pytest.raises(ValueError, match="flops=-1"):
        Cost(flops=-1)


def test_tasks_that_a_cost_model_cannot_tell_apart_are_priced_once():
    one = Cost(1)
    tasks = [
        Task(TaskId(0, Kind.FORWARD), LANE, one),
        Task(TaskId(0, Kind.FORWARD, "", 1), LANE, Cost(2)),
        Task(TaskId(1, Kind.FORWARD), LANE, one),
        Task(TaskId(1, Kind.BACKWARD), LANE, one),
        Task(TaskId(1, Kind.FORWARD, "conv1"), LANE, one),
    ]
    sorts, sort_of = Plan(tasks).priced_alike
    assert sort_of == [0, 1, 0, 2, 3]
    assert [task.name for task in sorts] == [tasks[i].name for i in (0, 1, 3, 4)]


def test_steps_that_do_other_things_do_not_repeat():
    def growing(step: int) -> Iterator[Task]:
        for i in range(1 + step):
            yield Task(TaskId(step, Kind.FORWARD, str(i)), LANE)

    assert len(Plan.of_steps(growing, 2)) == 3
    with pytest.raises(ValueError, match="steps"):
        Plan.of_steps(growing, 3)
