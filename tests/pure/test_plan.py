from collections.abc import Iterator

import pytest

from boxes import box, chain, link
from paceline.core.cost import Roofline, compute_lane
from paceline.core.plan import Cost, Kind, Plan, Task, TaskId
from paceline.core.simulate import makespan_s, simulate
from paceline.core.strategy import Window
from paceline.strategies.allreduce import plan as allreduce
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.hierarchy import plan as hierarchy
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.host import plan as host
from paceline.strategies.host.config import HostReduce
from paceline.strategies.tree import plan as tree
from paceline.strategies.tree.config import Tree

LANE = (compute_lane("cpu0"),)


def test_task_names_are_those_that_recordings_use():
    assert TaskId(0, Kind.FORWARD, "conv1", 1).name == "s0/forward[conv1]@worker1"
    assert TaskId(3, Kind.STEP, worker=0).name == "s3/step@worker0"
    assert TaskId(2, Kind.REDUCE, "1").name == "s2/reduce[1]"
    assert TaskId(2, Kind.SEND, "fc1", None, 3).name == "s2/send[fc1/3]"


def test_a_task_is_found_by_the_identity_of_its_fields():
    task = Task(TaskId(2, Kind.SEND, "fc1", 1, 3), LANE)
    assert (task.kind, task.part, task.sub_batch) == (Kind.SEND, "fc1", 3)
    assert Plan([task])["s2/send[fc1/3]@worker1"] is task
    assert Task(task.id, LANE, Cost()) == task


def task(part: str, *after: str, kind: Kind = Kind.FORWARD) -> Task:
    return Task(TaskId(0, kind, part), LANE, after=tuple(TaskId(0, kind, one) for one in after))


def test_a_task_may_only_wait_for_earlier_ones():
    message = r"s0/forward\[a\]: waits for 's0/forward\[b\]', which is no earlier task"
    with pytest.raises(ValueError, match=message):
        Plan([task("a", "b"), task("b")])


def test_a_task_cannot_wait_for_itself():
    with pytest.raises(ValueError, match="no earlier task"):
        Plan([task("a", "a")])


def test_a_name_stands_once():
    with pytest.raises(ValueError, match=r"a\]: the name stands twice"):
        Plan([task("a"), task("a")])


def test_a_task_runs_on_something():
    with pytest.raises(ValueError, match="run on something"):
        Plan([Task(TaskId(0, Kind.FORWARD, "a"), ())])


def test_work_cannot_be_negative():
    with pytest.raises(ValueError, match="negative"):
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


def priced(plan: Plan) -> list[Cost]:
    sorts, sort_of = plan.priced_alike
    return [sorts[sort].cost for sort in sort_of]


def same(one: Plan, other: Plan) -> bool:
    """Whether nothing that anybody asks of two plans tells them apart."""
    lists = [[sorted(of) for of in plan.children] for plan in (one, other)]
    return (
        one.tasks == other.tasks
        and lists[0] == lists[1]
        and (one.num_parents, one.held) == (other.num_parents, other.held)
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
        (host, HostReduce(workers=3, codec="half")),
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
            yield Task(TaskId(step, Kind.FORWARD, str(i)), LANE)

    assert len(Plan.of_steps(growing, 2)) == 3
    with pytest.raises(ValueError, match="the same tasks in the same order"):
        Plan.of_steps(growing, 3)
