"""Plans of trees of hubs, against closed forms: bytes, seconds, memory, and what is refused."""

import pytest

from boxes import FLOPS_PER_S, box, link
from paceline.core.cost import Roofline, compute_lane, link_lane, update_cost
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.plan import Kind
from paceline.core.simulate import period
from paceline.core.strategy import Window
from paceline.core.wire_format import Purpose
from paceline.planner import forecast
from paceline.strategies.wheel import STRATEGY
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.plan import memory, place, plan
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages, split
from wheels import BODY, CROSSING, HEAD, SAMPLES, model

WHOLE = BODY + HEAD
UPDATE_S = update_cost(model()).flops / FLOPS_PER_S
FAST, INNER, MEMORY = 1e15, 20 * CROSSING, 10 * WHOLE  # bytes a second


def rooms(num_rooms: int, num_bodies: int, between: float = FAST, inner: float = INNER) -> Machine:
    """A root, and rooms of a child hub and its bodies: a host each, whose links are a tree."""
    hosts, links = ["root"], []
    for room in range(num_rooms):
        links.append(link("root", f"hub{room}", between))
        links += [link(f"hub{room}", f"body{room}{i}", inner) for i in range(num_bodies)]
        hosts += [f"hub{room}", *(f"body{room}{i}" for i in range(num_bodies))]
    memory = {"memory_bandwidth_bytes_per_s": MEMORY}
    return box(*["cpu"] * len(hosts), links=links, hosts=hosts, host=memory)


def period_of(machine: Machine, config: Wheel, steps: int = 24, **of_model: float) -> float:
    work = model(**of_model)
    return period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), steps)


@pytest.mark.parametrize(
    ("workers", "lanes", "gather", "num_exchanges"),
    [(2, 1, None, 12), (4, 2, None, 12), (8, 2, 8, 6), (4, 1, 3, 8), (6, 2, 1, 36), (4, 2, 20, 1)],
)
@pytest.mark.parametrize("staleness", [0, 16])
def test_links_carry_the_bytes_of_the_formulas(workers, lanes, gather, num_exchanges, staleness):
    if staleness == 0:
        lanes = 1
    config = Wheel(workers, lanes, child_hubs=2, gather=gather, staleness=staleness)
    work, of_hub = model(), workers // 2
    machine = rooms(2, -(-of_hub // lanes))
    tasks = plan(work, machine, config, Window(12)).tasks
    sent = messages(split(work, config), config)

    def carried(one: str, other: str) -> int:
        return sum(task.cost.nbytes for task in tasks if link_lane(one, other) in task.on)

    for room in range(2):
        hub = f"hub{room}"
        # Each child sends the mean of so many steps, with both halves of the model.
        assert carried(hub, "root") == carried("root", hub) == num_exchanges * WHOLE
        bodies = [f"body{room}{i}" for i in range(-(-of_hub // lanes))]
        for ends, purposes in ((0, TO_HUB), (1, FROM_HUB)):
            found = sum(carried(*((one, hub), (hub, one))[ends]) for one in bodies)
            assert found == 12 * of_hub * sum(sent[purpose].nbytes for purpose in purposes)
    updates = [task for task in tasks if task.kind is Kind.STEP]
    assert {task.on for task in updates} == {(compute_lane("cpu0"),)}
    assert len(updates) == 2 * num_exchanges


@pytest.mark.parametrize("num_rooms", [1, 2, 3])
def test_children_in_step_take_a_worker_s_step_the_sum_the_way_and_all_updates(num_rooms):
    between = WHOLE / 2.0  # an exchange takes two seconds each way
    machine = rooms(num_rooms, 1, between)
    config = Wheel(num_rooms, lanes=1, child_hubs=num_rooms, staleness=0)
    fetched = (BODY + 2 * CROSSING + BODY + 4 * SAMPLES) / INNER
    copies_s = (3 + 2) * WHOLE / MEMORY  # a sum, and the parameters that come back
    # The labels are on their way beside the body's forward.
    step_s = 3.0 + 0.3 + fetched - 4 * SAMPLES / INNER + copies_s + 4.0 + num_rooms * UPDATE_S
    assert period_of(machine, config) == pytest.approx(step_s, rel=1e-6)


def test_a_slow_way_to_the_root_sets_the_pace_of_an_exchange_and_not_of_a_step():
    between = WHOLE / 40.0
    machine = rooms(2, 1, between)
    # 40 s each way, one exchange of a child at a time: of one step of each worker, or of ten.
    copy_s = 2 * WHOLE / MEMORY
    exchange_s = 80 + UPDATE_S + copy_s
    for gather in (2, 20):
        config = Wheel(4, lanes=2, child_hubs=2, gather=gather)
        expected = max(6.0, exchange_s * 2 / gather)
        assert period_of(machine, config, steps=60) == pytest.approx(expected, rel=0.02)


def test_heads_of_two_children_are_computed_side_by_side():
    # A head takes 2.4 s, and four bodies 3 s a step each: one hub computes four heads, two two.
    flat = box(*["cpu"] * 5, hosts="abcde", links=[link("a", one, FAST) for one in "bcde"])
    alone_s = period_of(flat, Wheel(4, lanes=1), head_s=0.8)
    assert alone_s == pytest.approx(4 * (2.4 + UPDATE_S), rel=1e-3)
    tree_s = period_of(rooms(2, 2, inner=FAST), Wheel(4, lanes=1, child_hubs=2), head_s=0.8)
    # A worker waits for both heads, and then computes.
    assert tree_s < 0.7 * alone_s
    assert tree_s >= 2 * 2.4


def test_a_forecast_covers_whole_means():
    machine = rooms(2, 1)
    config = Wheel(4, lanes=2, child_hubs=2, gather=20)
    found = forecast(model(), machine, STRATEGY, config, 4 * SAMPLES)
    # A child has two steps of workers in each step, and so a mean in every tenth.
    assert found.link_nbytes["hub0->root"] == pytest.approx(WHOLE / 10, rel=1e-9)
    assert found.step_s == pytest.approx(6.0, rel=0.02)


def test_devices_are_taken_hub_by_hub_in_the_machines_order():
    found = place(rooms(2, 2), Wheel(8, lanes=2, child_hubs=2))
    assert found.hub.host == "root"
    assert [one.host for one in found.heads] == ["hub0"] * 4 + ["hub1"] * 4
    assert [one.host for one in found.bodies] == [
        f"body{room}{i}" for room in (0, 1) for i in (0, 1) for _ in range(2)
    ]


def test_the_memory_of_root_and_children():
    found = memory(model(), rooms(2, 1), Wheel(4, lanes=2, child_hubs=2))
    head_features = 16000 + 400 + 16400
    assert found["cpu0"] == (2 + 2) * WHOLE
    child = 3 * WHOLE + 2 * (WHOLE + CROSSING) + head_features
    assert found["cpu1"] == found["cpu3"] == child
    assert found["cpu2"] == memory(model(), rooms(1, 1), Wheel(2, child_hubs=1))["cpu2"]


def test_parameters_that_are_fetched_hold_the_exchange_before_the_full_sum():
    tasks = plan(model(), rooms(1, 1), Wheel(1, lanes=1, child_hubs=1), Window(4))
    # Step 2 begins with the sum of step 1 full, and step 0's exchange must be back.
    fetch = tasks[f"s2/send[{Purpose.PARAMETERS}]@worker0"]
    assert {one.name for one in fetch.after} == {
        "s1/reduce[sum]@worker0",
        "s0/reduce[copy]@worker0",
    }
    in_step = Wheel(1, lanes=1, child_hubs=1, staleness=0)
    fetch = plan(model(), rooms(1, 1), in_step, Window(4))[f"s2/send[{Purpose.PARAMETERS}]@worker0"]
    assert "s1/reduce[copy]@worker0" in {one.name for one in fetch.after}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"workers": 3, "child_hubs": 2}, "child_hubs: 3 workers cannot be shared equally by 2"),
        ({"workers": 8, "child_hubs": 4}, "8 in lanes of 2 and 4 child hubs need 8 devices beside"),
        ({"gather": 3}, "gather: goes only with child_hubs"),
        ({"workers": 2, "child_hubs": 2, "staleness": 0}, "staleness: lanes that alternate"),
    ],
)
def test_what_is_no_tree_is_refused(config, message):
    with pytest.raises(InvalidInput, match=message):
        plan(model(), rooms(2, 2), Wheel(**config), Window(1))
