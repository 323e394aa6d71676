"""Plans of a server in main memory, which lends a head its parameters (section 3.4.2)."""

from itertools import product

import pytest

from boxes import after, box, link
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.planner import search
from paceline.strategies import find_strategy
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import memory, placements, plan
from wheels import BODY, CROSSING, HEAD, SAMPLES, model

BUS = 1e6  # bytes a second of each copy
LENT = Wheel(workers=2, server_memory="host")
KEPT = Wheel(workers=2)


def two_gpus(**facts) -> Machine:
    """A GPU on each of two hosts, which a fast link joins."""
    links = [link("a", "b", 1e12), *(link(f"gpu{i}", host, BUS) for i, host in enumerate("ab"))]
    return box("gpu", "gpu", links=links, hosts="ab", **facts)


def planned(config: Wheel, machine: Machine | None = None, steps: int = 2) -> Plan:
    return plan(model(), machine or two_gpus(), config, Window(steps))


def test_each_answer_copies_the_heads_parameters_there_and_its_gradients_back():
    tasks = planned(LENT)
    there, back = tasks["s1/h2d[head_parameters]@worker0"], tasks["s1/d2h[head_gradients]@worker0"]
    assert there.cost.nbytes == back.cost.nbytes == HEAD
    # As soon as the body's outputs are there; and before the reply.
    assert set(after(there)) == {"s1/h2d[labels]@worker0", "s1/h2d[activations]@worker0"}
    assert after(tasks["s1/forward[f0]@worker0"]) == (there.name,)
    assert after(tasks["s1/d2h[activation_gradients]@worker0"]) == (back.name,)
    # The hub's thread waits for both: nothing else is computed there meanwhile.
    for one in (there, back):
        assert "gpu0/compute" in map(str, one.on)


def test_the_bodys_parameters_and_gradients_never_cross_the_bus_of_the_hub():
    for config, crossings in ((KEPT, {"d2h": {"parameters"}, "h2d": {"gradients"}}), (LENT, {})):
        own = planned(config, steps=1)
        found = {
            (task.kind, task.part)
            for task in own.tasks
            if "gpu0" in {on.owner for on in task.on}
            and task.part in ("parameters", "gradients")
            and task.kind in (Kind.D2H, Kind.H2D)
        }
        assert found == {(Kind(kind), part) for kind, parts in crossings.items() for part in parts}


def test_updates_are_made_by_the_memory_of_the_host():
    update = planned(LENT)["s0/step@worker0"]
    assert [str(on) for on in update.on] == ["gpu0/compute", "a/reduce"]
    slow = two_gpus(host={"memory_bandwidth_bytes_per_s": 1e3})
    assert Roofline.of(slow).seconds(update) == pytest.approx(5 * (BODY + HEAD) / 1e3)


def test_a_hub_that_limits_is_later_by_its_copies():
    work = model(body_s=0.01, head_s=1.0)

    def step_s(config: Wheel) -> float:
        machine = two_gpus()
        return period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), 8)

    copies = 2 * 2 * HEAD / BUS  # of two workers, there and back
    assert step_s(LENT) - step_s(KEPT) == pytest.approx(copies, rel=0.1)


def test_the_device_needs_one_head_and_the_host_the_rest():
    found = memory(model(), two_gpus(), LENT)
    head_features = 16000 + 400 + 16400
    assert found["gpu0"] == 2 * HEAD + 2 * CROSSING + head_features
    assert found["a"] == 2 * (BODY + HEAD) + 2 * (BODY + HEAD)
    kept = memory(model(), two_gpus(), KEPT)
    assert kept["gpu0"] + 2 * HEAD == found["gpu0"] + found["a"]
    assert "a" not in kept
    assert kept["gpu1"] == found["gpu1"]


def test_cores_keep_everything_in_main_memory_anyway():
    links = [link("a", "b", 1e12)]
    cpus = box("cpu", "cpu", links=links, hosts="ab")
    assert planned(LENT, cpus).tasks == planned(KEPT, cpus).tasks
    assert memory(model(), cpus, LENT) == memory(model(), cpus, KEPT)


def test_a_body_of_cores_on_the_servers_host_exchanges_through_its_memory():
    machine = box("gpu", "cpu", links=[link("gpu0", "h", BUS)])
    tasks = planned(LENT, machine)
    assert [str(on) for on in tasks["s0/send[gradients]@worker0"].on] == ["h/reduce", "cpu1/upload"]
    assert tasks["s0/send[gradients]@worker0"].cost.nbytes == 2 * BODY


def test_child_hubs_sum_in_their_hosts_memory():
    links = [link("a", "b", 1e12), *(link(f"gpu{i}", h, BUS) for i, h in enumerate("aabbb"))]
    machine = box(*["gpu"] * 5, links=links, hosts="aabbb")
    config = Wheel(workers=2, lanes=1, child_hubs=2, server_memory="host")
    tasks = planned(config, machine)
    added = tasks["s0/reduce[sum]@worker0"]
    assert [str(on) for on in added.on] == ["gpu1/compute", "a/reduce"]
    assert "s0/d2h[hubs_gradients]@worker1" not in {task.name for task in tasks.tasks}
    assert "s0/send[hubs_gradients]@worker1" in {task.name for task in tasks.tasks}
    needed = memory(model(), machine, config)
    assert needed["b"] == (3 + 1) * (BODY + HEAD)
    assert needed["a"] == (3 + 1) * (BODY + HEAD) + (2 + 2) * (BODY + HEAD)


def test_the_planner_lends_the_head_where_the_device_is_too_small():
    wheel = find_strategy("wheel")

    def chosen(machine: Machine) -> list[tuple[str, tuple[str, ...]]]:
        ranking = search(lambda samples: model(), machine, [wheel], 2 * SAMPLES, workers=2)
        return [(one.config.server_memory, one.notes) for one in ranking if one.codec is None]

    (usual,) = chosen(two_gpus())
    assert usual[0] == "device"
    least = max(memory(model(), two_gpus(), LENT)[name] for name in ("gpu0", "gpu1"))
    assert least < memory(model(), two_gpus(), KEPT)["gpu0"]
    (small,) = chosen(two_gpus(device={"memory_bytes": least}))
    assert small[0] == "host"
    assert any("--set server_memory=host" in note for note in small[1])
    none = search(
        lambda samples: model(),
        two_gpus(device={"memory_bytes": 1000}),
        [wheel],
        2 * SAMPLES,
        workers=2,
    )
    assert not list(none)


def test_child_hubs_are_tried_with_their_servers_in_either_memory():
    tried = [(one.child_hubs, one.server_memory) for one in placements(model(), Wheel(workers=4))]
    assert sorted(tried) == sorted(product((0, 2, 4), ("device", "host")))
    asked = placements(model(), Wheel(workers=4, child_hubs=2, server_memory="host"))
    assert [(one.child_hubs, one.server_memory) for one in asked] == [(2, "host")]
