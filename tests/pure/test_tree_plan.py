from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from boxes import ExchangeOnly, WithoutUpdate, after, box, chain, link, named
from paceline.core.compare import breakdown_by_device
from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.plan import children, parent, plan

NBYTES = 4000
NBYTES_PER_S = 1000.0


def gpus(number: int, adds_per_s: float = 1e18):
    """GPUs of which each has a link of its own with each other one."""
    links = [link(f"gpu{i}", f"gpu{j}", NBYTES_PER_S) for i in range(number) for j in range(i)]
    device = {"memory_bandwidth_bytes_per_s": adds_per_s}
    return box(*["gpu"] * number, links=links, device=device)


def test_four_workers_have_these_tasks_and_no_others():
    tasks = plan(chain((1, NBYTES)), gpus(4), Tree(workers=4), Window(1))
    own = {
        f"{name}@worker{w}"
        for name in ("load", "forward[l0]", "backward[l0]", "step")
        for w in range(4)
    }
    assert named(tasks) - own == {
        *(f"send[{way}{rank}]" for way in ("up", "down") for rank in (1, 2, 3)),
        *("reduce[1]@worker0", "reduce[3]@worker2", "reduce[2]@worker0"),
    }


def test_one_worker_exchanges_nothing():
    tasks = plan(chain((1, NBYTES)), box("cpu"), Tree(workers=1), Window(2)).tasks
    assert {task.kind for task in tasks} == {Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


@given(st.integers(1, 300))
def test_at_distance_k_send_those_that_k_leaves_over_after_division_by_2k(world_size):
    expected, k = set(), 1
    while k < world_size:
        expected |= {(rank, rank - k) for rank in range(world_size) if rank % (2 * k) == k}
        k *= 2
    assert {(r, parent(r)) for r in range(1, world_size)} == expected
    assert parent(0) is None
    for rank in range(world_size):
        below = children(rank, world_size)
        assert below == sorted(below)
        assert {(child, rank) for child in below} == {e for e in expected if e[1] == rank}


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_an_exchange_takes_a_message_each_way_and_an_addition_for_each_level(workers):
    # Messages of 4 s, additions of 3 x 4000 / 24000 = 0.5 s.
    machine = gpus(workers, adds_per_s=24000.0)

    def window(steps):
        return plan(chain((1, NBYTES)), machine, Tree(workers=workers), Window(steps))

    levels = ceil(log2(workers))
    step_s = 1 + levels * (2 * 4.0 + 0.5)
    assert simulate(window(1), WithoutUpdate(machine)).makespan_s == pytest.approx(step_s)
    if workers & (workers - 1) == 0:
        assert period(window, WithoutUpdate(machine), 3) == pytest.approx(step_s)


@pytest.mark.parametrize(("uses_cores", "workers"), [(False, 4), (True, 4), (True, 5)])
def test_processes_of_one_host_share_its_link(uses_cores, workers):
    links = [link("h", "h", NBYTES_PER_S, 0.25, uses_cores=uses_cores)]
    machine = box(*["cpu"] * workers, links=links)
    tasks = plan(chain((0, NBYTES)), machine, Tree(workers=workers), Window(1))
    assert simulate(tasks, ExchangeOnly(machine)).makespan_s == pytest.approx(
        2 * (workers - 1) * 4.25
    )


def test_additions_of_cores_run_at_the_speed_of_the_memory_and_not_of_layers():
    machine = box(
        "cpu",
        "cpu",
        links=[link("h", "h", 1e18)],
        host={"memory_bandwidth_bytes_per_s": 6000.0},
        device={"memory_bandwidth_bytes_per_s": 1.0},
    )
    tasks = plan(chain((0, NBYTES)), machine, Tree(), Window(1))
    assert simulate(tasks, ExchangeOnly(machine)).makespan_s == pytest.approx(2.0)


def test_every_worker_updates_when_it_has_the_means_and_has_passed_them_on():
    tasks = plan(chain((1, NBYTES)), gpus(4), Tree(workers=4), Window(2))
    ends = {s.name: s for s in simulate(tasks, WithoutUpdate(gpus(4))).spans}
    for rank in (1, 2, 3):
        down = ends[f"s0/send[down{rank}]"]
        assert ends[f"s0/step@worker{rank}"].start_s >= down.end_s
        assert after(tasks[f"s1/load@worker{rank}"]) == (f"s0/step@worker{rank}",)
    assert after(tasks["s0/send[down2]"]) == ("s0/reduce[2]@worker0",)
    # Who has children sends before it goes on, the nearest last.
    assert after(tasks["s0/step@worker0"]) == ("s0/send[down1]",)
    assert after(tasks["s0/step@worker2"]) == ("s0/send[down3]",)
    # The largest distance first, so that both halves of the tree go on at once.
    assert ends["s0/send[down1]"].start_s == ends["s0/send[down3]"].start_s
    assert ends["s0/send[down2]"].end_s == ends["s0/send[down1]"].start_s


def test_the_breakdown_counts_the_servers_additions_for_all():
    machine = gpus(2, adds_per_s=6000.0)
    timeline = simulate(
        plan(chain((3, NBYTES)), machine, Tree(), Window(5)), WithoutUpdate(machine)
    )
    parts = breakdown_by_device(timeline)
    for device, (backward_s, exposed_s, idle_s) in {
        "gpu0": (3, 8 + 2, 0),
        "gpu1": (3, 8, 2),  # the server adds meanwhile
    }.items():
        assert parts[device].backward_s == pytest.approx(backward_s)
        assert parts[device].exposed_s == pytest.approx(exposed_s)
        assert parts[device].idle_s == pytest.approx(idle_s, abs=1e-9)
    assert timeline.period_s() == pytest.approx(13)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InvalidInput, match="workers: 3 do not fit on machine 'box'"):
        plan(chain((1, 4)), box("cpu", "cpu"), Tree(workers=3), Window(1))
    with pytest.raises(InvalidInput, match="two workers on 'h' need a link"):
        plan(chain((1, 4)), box("cpu", "cpu"), Tree(), Window(1))
    with pytest.raises((ValidationError, TypeError)):
        Tree(workers=0)
