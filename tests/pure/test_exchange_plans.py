"""What holds of every strategy that exchanges all gradients in each step, and of their settings."""

import pytest
from pydantic import ValidationError

from boxes import box, chain, codec_speed, link
from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind, Plan
from paceline.core.simulate import makespan_s, simulate
from paceline.core.strategy import Window
from paceline.strategies import STRATEGIES
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.host.config import HostReduce
from paceline.strategies.local.config import Local
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.tree.config import Tree
from paceline.strategies.wheel.config import Wheel
from refusals import refused

every_exchange = pytest.mark.parametrize("name", ["allreduce", "host", "tree", "hierarchy"])
WORK = chain((2, 400), (1, 4000))


@every_exchange
def test_one_worker_exchanges_nothing(name):
    known = STRATEGIES[name]
    tasks = known.plan(WORK, box("cpu"), known.config(workers=1), Window(2)).tasks
    assert {task.kind for task in tasks} == {Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


@every_exchange
@pytest.mark.parametrize(
    ("workers", "kinds", "hosts", "field"),
    [
        (3, ["cpu", "cpu"], "hh", "workers"),
        (2, ["cpu", "cpu"], "ab", "machine box"),
        (2, ["gpu", "gpu"], "ab", "machine box"),
    ],
)
def test_what_a_machine_has_no_devices_or_links_for_is_refused(name, workers, kinds, hosts, field):
    known = STRATEGIES[name]
    with refused(field):
        known.plan(WORK, box(*kinds, hosts=hosts), known.config(workers=workers), Window(1))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("allreduce", {"codec": "dynamic8"}),
        ("tree", {}),
        ("host", {"codec": "half"}),
        ("hierarchy", {"between": "servers"}),
    ],
)
def test_steps_that_repeat_are_as_if_each_was_made(monkeypatch, name, options, num_steps):
    known = STRATEGIES[name]
    codecs = {"codecs": dict.fromkeys(("eightbit", "cast"), codec_speed(1e4, 1e4))}
    links = [link("a", "b", 1e3), link("a", "a", 1e4, 0.1)]
    machine = box("cpu", "cpu", "cpu", hosts="aab", links=links, device=codecs)

    def planned() -> Plan:
        return known.plan(WORK, machine, known.config(workers=3, **options), Window(num_steps))

    def one_by_one(cls, tasks, num_steps: int) -> Plan:
        return cls(task for step in range(num_steps) for task in tasks(step))

    repeated = planned()
    monkeypatch.setattr(Plan, "of_steps", classmethod(one_by_one))
    made = planned()
    # Nothing that anybody asks of the two plans tells them apart.
    assert (repeated.tasks, repeated.resources) == (made.tasks, made.resources)
    assert (repeated.num_parents, repeated.held) == (made.num_parents, made.held)
    assert [sorted(one) for one in repeated.children] == [sorted(one) for one in made.children]
    assert priced(repeated) == priced(made)
    assert len(repeated) == len(made)
    cost = Roofline.of(machine)
    assert simulate(repeated, cost).spans == simulate(made, cost).spans
    assert makespan_s(repeated, cost) == simulate(made, cost).makespan_s


def priced(plan: Plan) -> list:
    sorts, sort_of = plan.priced_alike
    return [sorts[sort].cost for sort in sort_of]


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (AllReduce, {"workers": 0}),
        (AllReduce, {"bucket_mb": 0}),
        (AllReduce, {"buckets": 3}),
        (HostReduce, {"workers": 0}),
        (HostReduce, {"chunk": 0}),
        (HostReduce, {"chunks": 3}),
        (Tree, {"workers": 0}),
        (Hierarchy, {"workers": 0}),
        (Hierarchy, {"chunk": 0}),
        (Hierarchy, {"between": "trees"}),
        (Hierarchy, {"servers": 1}),  # without between="servers"
        (Wheel, {"workers": 0}),
        (Wheel, {"lanes": 0}),
        (Wheel, {"gradients": "zip"}),
        (Wheel, {"lane": 2}),
        (Hogbatch, {"cpu_batch": (64, 1)}),
        (Hogbatch, {"gpu_batch": (0, 8)}),
        (Hogbatch, {"alpha": 1.0}),
        (Hogbatch, {"beta": 0.0}),
        (Hogbatch, {"policy": "omnivore"}),
        (Local, {"codec": "zip"}),
        *[
            (SubBatch, {field: codec})
            for field in ("activations", "activation_gradients")
            # Of fixed size, and without a memory of what it has rounded.
            for codec in ("auto", "threshold:0.1", "zip", "onebit", "e3m0+feedback")
        ],
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(config, fields):
    with pytest.raises((InvalidInput, ValidationError)) as caught:
        config(**fields)
    if isinstance(caught.value, InvalidInput):
        assert caught.value.field in {*fields, "codec"}
    else:
        (fault,) = caught.value.errors()
        assert fault["loc"] in {(next(iter(fields)),), ()}
