import pytest

from paceline.core.plan import Cost, Kind, Plan, Resource, Task, task_name

LANE = (Resource("cpu0", "compute"),)


def test_task_names_are_those_that_recordings_use():
    assert task_name(0, Kind.FORWARD, "conv1", 1) == "s0/forward[conv1]@worker1"
    assert task_name(3, Kind.STEP, worker=0) == "s3/step@worker0"
    assert task_name(2, Kind.REDUCE, "1") == "s2/reduce[1]"


def test_a_task_may_only_wait_for_earlier_ones():
    first = Task("a", Kind.FORWARD, LANE, after=("b",))
    second = Task("b", Kind.FORWARD, LANE)
    with pytest.raises(ValueError, match=r"a: waits for 'b', which is no earlier task"):
        Plan([first, second])


def test_a_task_cannot_wait_for_itself():
    with pytest.raises(ValueError, match="no earlier task"):
        Plan([Task("a", Kind.FORWARD, LANE, after=("a",))])


def test_a_name_stands_once():
    with pytest.raises(ValueError, match="a: the name stands twice"):
        Plan([Task("a", Kind.FORWARD, LANE), Task("a", Kind.STEP, LANE)])


def test_a_task_runs_on_something():
    with pytest.raises(ValueError, match="run on something"):
        Plan([Task("a", Kind.FORWARD, ())])


def test_work_cannot_be_negative():
    with pytest.raises(ValueError, match="negative"):
        Cost(flops=-1)


def test_tasks_that_a_cost_model_cannot_tell_apart_are_priced_once():
    one = Cost(1)
    tasks = [
        Task("s0/forward", Kind.FORWARD, LANE, one),
        Task("s0/other", Kind.FORWARD, LANE, Cost(2)),
        Task("s1/forward", Kind.FORWARD, LANE, one),
        Task("s1/backward", Kind.BACKWARD, LANE, one),
        Task("s1/part", Kind.FORWARD, LANE, one, part="conv1"),
    ]
    sorts, sort_of = Plan(tasks).priced_alike
    assert sort_of == [0, 1, 0, 2, 3]
    assert [task.name for task in sorts] == [tasks[i].name for i in (0, 1, 3, 4)]
