from collections.abc import Iterator

import pytest

from boxes import box, chain, link
from paceline.core.cost import Roofline
from paceline.core.plan import Cost, Kind, Plan, Resource, Task, task_name
from paceline.core.simulate import makespan_s, simulate
from paceline.core.strategy import Window
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.hierarchy import plan as hierarchy
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.host import plan as host
from paceline.strategies.host.config import Host
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree

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


def priced(plan: Plan) -> list[Cost]:
    sorts, sort_of = plan.priced_alike
    return [sorts[sort].cost for sort in sort_of]


def same(one: Plan, other: Plan) -> bool:
    """Whether nothing that anybody asks of two plans tells them apart."""
    lists = [[sorted(of) for of in plan.children] for plan in (one, other)]
    return (
        one.tasks == other.tasks
        and lists[0] == lists[1]
        and one.columns[0] == other.columns[0]
        and [list(column) for column in one.columns] == [list(column) for column in other.columns]
        and (one.num_parents, one.held, one.index) == (other.num_parents, other.held, other.index)
        and one.resources == other.resources
        and priced(one) == priced(other)
        and len(one) == len(other)
    )


def one_by_one(cls, tasks, num_steps: int) -> Plan:
    return cls(task for step in range(num_steps) for task in tasks(step))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("module", "config"),
    [
        (allreduce, AllReduce(workers=3, codec="dynamic8")),
        (tree, Tree(workers=3)),
        (host, Host(workers=3, codec="half")),
        (hierarchy, Hierarchy(workers=3, between="servers")),
    ],
    ids=lambda one: "",
)
def test_steps_that_repeat_are_as_if_each_was_made(monkeypatch, module, config, num_steps):
    speed = {"encode_values_per_s": 1e4, "decode_values_per_s": 1e4}
    codecs = {"codecs": {"eightbit": speed, "cast": speed}}
    links = [link("a", "b", 1e3), link("a", "a", 1e4, 0.1)]
    machine = box("cpu", "cpu", "cpu", hosts="aab", links=links, device=codecs)
    work = chain((2, 400), (1, 4000))
    repeated = module.plan(work, machine, config, Window(num_steps))
    monkeypatch.setattr(Plan, "of_steps", classmethod(one_by_one))
    made = module.plan(work, machine, config, Window(num_steps))
    assert same(repeated, made)
    cost = Roofline.of(machine)
    assert simulate(repeated, cost).spans == simulate(made, cost).spans
    assert makespan_s(repeated, cost) == simulate(made, cost).makespan_s


def test_steps_that_do_other_things_do_not_repeat():
    def growing(step: int) -> Iterator[Task]:
        for i in range(1 + step):
            yield Task(task_name(step, Kind.FORWARD, str(i)), Kind.FORWARD, LANE)

    assert len(Plan.of_steps(growing, 2)) == 3
    with pytest.raises(ValueError, match="the same tasks in the same order"):
        Plan.of_steps(growing, 3)
