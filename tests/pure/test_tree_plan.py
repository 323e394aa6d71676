"""The binary tree of parameter servers against closed forms."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import WithoutUpdate, after, box, chain, exchange_s, link, named
from paceline.core.compare import breakdown_by_device
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.plan import children, parent, plan
from refusals import refused

NBYTES = 4000
NBYTES_PER_S = 1000.0


def gpus(number: int, adds_per_s: float = 1e18):
    """GPUs of which each has a link of its own with each other one."""
    links = [link(f"gpu{i}", f"gpu{j}", NBYTES_PER_S) for i in range(number) for j in range(i)]
    device = {"memory_bandwidth_bytes_per_s": adds_per_s}
    return box(*["gpu"] * number, links=links, device=device)


def test_four_workers_have_these_tasks_and_no_others():
    tasks = plan(chain((1, NBYTES)), gpus(4), Tree(workers=4), Window(1))
    names = ("load", "forward[l0]", "backward[l0]", "step")
    assert named(tasks) == {f"{name}@worker{w}" for name in names for w in range(4)} | {
        *(f"send[{way}{rank}]" for way in ("up", "down") for rank in (1, 2, 3)),
        *("reduce[1]@worker0", "reduce[3]@worker2", "reduce[2]@worker0"),
    }


@given(st.integers(1, 300))
def test_at_distance_k_send_those_that_k_leaves_over_after_division_by_2k(world_size):
    expected, k = set(), 1
    while k < world_size:
        expected |= {(rank, rank - k) for rank in range(world_size) if rank % (2 * k) == k}
        k *= 2
    assert {(r, parent(r)) for r in range(1, world_size)} == expected
    assert parent(0) is None
    below = {rank: children(rank, world_size) for rank in range(world_size)}
    assert all(own == sorted(own) for own in below.values())
    assert {(child, rank) for rank, own in below.items() for child in own} == expected


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_an_exchange_takes_a_message_each_way_and_an_addition_for_each_level(workers):
    # Messages of 4 s, additions of 3 x 4000 / 24000 = 0.5 s.
    machine = gpus(workers, adds_per_s=24000.0)

    def window(steps):
        return plan(chain((1, NBYTES)), machine, Tree(workers=workers), Window(steps))

    step_s = 1 + ceil(log2(workers)) * (2 * 4.0 + 0.5)
    assert simulate(window(1), WithoutUpdate(machine)).makespan_s == pytest.approx(step_s)
    if workers & (workers - 1) == 0:
        assert period(window, WithoutUpdate(machine), 3) == pytest.approx(step_s)


@pytest.mark.parametrize(("uses_cores", "workers"), [(False, 4), (True, 4), (True, 5)])
def test_processes_of_one_host_share_its_link(uses_cores, workers):
    links = [link("h", "h", NBYTES_PER_S, 0.25, uses_cores=uses_cores)]
    machine = box(*["cpu"] * workers, links=links)
    tasks = plan(chain((0, NBYTES)), machine, Tree(workers=workers), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(2 * (workers - 1) * 4.25)
    with refused("machine box"):
        plan(chain((0, NBYTES)), box("cpu", "cpu"), Tree(), Window(1))


def test_additions_of_cores_run_at_the_speed_of_the_memory_and_not_of_layers():
    own, layers = ({"memory_bandwidth_bytes_per_s": rate} for rate in (6000.0, 1.0))
    machine = box("cpu", "cpu", links=[link("h", "h", 1e18)], host=own, device=layers)
    tasks = plan(chain((0, NBYTES)), machine, Tree(), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(2.0)


def test_every_worker_updates_when_it_has_the_means_and_has_passed_them_on():
    tasks = plan(chain((1, NBYTES)), gpus(4), Tree(workers=4), Window(2))
    ends = {s.name: s for s in simulate(tasks, WithoutUpdate(gpus(4))).spans}
    for rank in (1, 2, 3):
        assert ends[f"s0/step@worker{rank}"].start_s >= ends[f"s0/send[down{rank}]"].end_s
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
    tasks = plan(chain((3, NBYTES)), machine, Tree(), Window(5))
    timeline = simulate(tasks, WithoutUpdate(machine))
    found = {
        name: (parts.backward_s, parts.exposed_s, round(parts.idle_s, 9))
        for name, parts in breakdown_by_device(timeline).items()
    }
    # The server adds meanwhile.
    assert found == {"gpu0": pytest.approx((3, 8 + 2, 0)), "gpu1": pytest.approx((3, 8, 2))}
    assert timeline.period_s() == pytest.approx(13)
