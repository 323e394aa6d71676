"""The exchanges of host, in chunks, and of tree against closed forms."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import WithoutUpdate, after, box, chain, exchange_s, link
from paceline.core.compare import breakdown_by_device
from paceline.core.cost import Measured, Roofline
from paceline.core.plan import Kind, PriceKey
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.plan import plan
from paceline.strategies.tree.config import Tree
from paceline.strategies.tree.plan import children, parent
from paceline.strategies.tree.plan import plan as plan_tree

NBYTES = 4000
GPU_LINKS = [link("gpu0", "h", 1000.0), link("gpu1", "h", 1000.0)]


def test_a_chunk_is_copied_when_its_last_layer_is_done_and_layers_of_the_end_stay_alone():
    tasks = plan(chain(*[(1, NBYTES)] * 5), box("cpu", "cpu"), HostReduce(chunk=3), Window(1))
    assert after(tasks["s0/d2h[0]@worker0"]) == ("s0/backward[l2]@worker0",)
    sizes = [tasks[f"s0/reduce[{part}]"].cost.nbytes / (3 * NBYTES) for part in range(3)]
    assert sizes == [3, 1, 1]


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_cpus_move_each_byte_through_their_memory_3n_plus_1_times(workers):
    # Each rank reads and writes its gradient, the sum reads all of them and writes one.
    nbytes_per_s, latency_s = 1e6, 0.25
    machine = box(
        *["cpu"] * workers,
        host={"memory_bandwidth_bytes_per_s": nbytes_per_s, "reduce_latency_s": latency_s},
        device={"memory_bandwidth_bytes_per_s": 1.0},  # that of layers: nothing to do with it
    )
    tasks = plan(chain((0, NBYTES)), machine, HostReduce(workers=workers), Window(1))
    expected = (3 * workers + 1) * NBYTES / nbytes_per_s + latency_s
    assert exchange_s(tasks, machine) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("uses_cores", [False, True])
def test_sums_hide_behind_backward_unless_the_ranks_have_all_cores(uses_cores):
    # 2 s of backward beside a sum of 1 s; the last layer's gradients are nothing.
    links = [link("h", "h", 1.0, uses_cores=uses_cores)]
    machine = box("cpu", "cpu", links=links, host={"reduce_latency_s": 1.0})
    tasks = plan(chain((2, 4), (2, 4)), machine, HostReduce(), Window(1))
    makespan_s = simulate(tasks, WithoutUpdate(machine)).makespan_s
    assert makespan_s == pytest.approx(4 + 1 + (1 if uses_cores else 0))


@pytest.mark.parametrize(
    ("share", "num_layers", "expected"),
    [(False, 1, 8), (True, 1, 16), (False, 2, 12)],  # a copy back beside the next one there
)
def test_gpus_share_a_link_that_takes_both_directions_at_once(share, num_layers, expected):
    behind = [link("gpu0", "gpu2", 1e9), link("gpu1", "gpu2", 1e9), link("gpu2", "h", 1000.0)]
    machine = box("gpu", "gpu", "gpu", links=behind if share else GPU_LINKS)
    tasks = plan(chain(*[(0, NBYTES)] * num_layers), machine, HostReduce(), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(expected)


@pytest.mark.parametrize(("chunk", "num_syncs"), [(1, 6), (2, 4), (5, 2), (6, 6)])
def test_each_chunk_synchronises_a_gpu_once_and_slows_its_backward(chunk, num_syncs):
    machine = box("gpu", "gpu", links=GPU_LINKS, device={"sync_latency_s": 0.125})
    tasks = plan(chain(*[(1, 4)] * 6), machine, HostReduce(chunk=chunk), Window(1))
    spans = simulate(tasks, Roofline.of(machine)).spans
    backward_s = max(s.end_s for s in spans if s.kind is Kind.BACKWARD)
    assert backward_s == pytest.approx(6 + 0.125 * num_syncs)


@pytest.mark.parametrize(
    ("facts", "measured", "expected"),
    [
        ({"sync_latency_s": 0.125}, {PriceKey("gpu0", Kind.BACKWARD, "l0"): 7.0}, 7.125),
        ({"call_latency_s": 0.5}, {}, 1.5),  # without a figure for it: the time of a call
    ],
)
def test_synchronising_is_paid_on_top_of_backward(facts, measured, expected):
    machine = box("gpu", "gpu", links=GPU_LINKS, device=facts)
    task = plan(chain((1, 4)), machine, HostReduce(), Window(1))["s0/backward[l0]@worker0"]
    assert Measured(measured, Roofline.of(machine)).seconds(task) == expected


def test_what_a_worker_waits_for_between_hosts_is_communication_and_not_idle_time():
    machine = box("cpu", "cpu", "cpu", hosts="aab", links=[link("a", "b", 100.0)])
    tasks = plan(chain((1, NBYTES)), machine, HostReduce(workers=3), Window(1))
    for parts in breakdown_by_device(simulate(tasks, Roofline.of(machine))).values():
        # A ring of two hosts: half of the bytes, twice.
        assert parts.exposed_s == pytest.approx(NBYTES / 100.0, rel=1e-6)
        assert parts.idle_s == pytest.approx(0.0, abs=1e-6)


def test_several_hosts_sum_their_own_and_exchange_the_sums_in_a_ring():
    # Three ranks on two hosts. Each host sends 2 (n - 1) / n of the bytes to the other.
    machine = box("cpu", "cpu", "cpu", hosts="aab", links=[link("a", "b", 1000.0, 0.25)])
    tasks = plan(chain((0, NBYTES), (0, NBYTES)), machine, HostReduce(workers=3), Window(1))
    send = tasks["s0/send[1]"]
    assert after(send) == ("s0/reduce[1]",)
    assert Roofline.of(machine).seconds(send) == pytest.approx(4.0 + 2 * 0.25)
    assert set(after(tasks["s0/step@worker2"])) >= {"s0/send[0]", "s0/send[1]"}
    assert exchange_s(tasks, machine) == pytest.approx(2 * 4.5)  # sums go on beside the network


def test_steps_follow_one_another_and_communication_belongs_to_the_devices():
    machine = box("cpu", "cpu", host={"reduce_latency_s": 1.0})

    def window(num_steps):
        return plan(chain((3, 4), (2, 4)), machine, HostReduce(), Window(num_steps))

    cost = WithoutUpdate(machine)
    assert period(window, cost, 3) == pytest.approx(3 + 2 + 1)
    parts = breakdown_by_device(simulate(window(4), cost))
    assert list(parts) == ["cpu0", "cpu1"]
    for part in parts.values():
        assert (part.exposed_s, part.hidden_s) == pytest.approx((1.0, 1.0))
        assert part.idle_s == pytest.approx(0.0, abs=1e-9)


TREE_BYTES_PER_S = 1000.0


def gpus(number: int, adds_per_s: float = 1e18):
    """GPUs of which each has a link of its own with each other one."""
    links = [link(f"gpu{i}", f"gpu{j}", TREE_BYTES_PER_S) for i in range(number) for j in range(i)]
    device = {"memory_bandwidth_bytes_per_s": adds_per_s}
    return box(*["gpu"] * number, links=links, device=device)


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
        return plan_tree(chain((1, NBYTES)), machine, Tree(workers=workers), Window(steps))

    step_s = 1 + ceil(log2(workers)) * (2 * 4.0 + 0.5)
    assert simulate(window(1), WithoutUpdate(machine)).makespan_s == pytest.approx(step_s)
    if workers & (workers - 1) == 0:
        assert period(window, WithoutUpdate(machine), 3) == pytest.approx(step_s)


@pytest.mark.parametrize(("uses_cores", "workers"), [(False, 4), (True, 4), (True, 5)])
def test_processes_of_one_host_share_its_link(uses_cores, workers):
    links = [link("h", "h", TREE_BYTES_PER_S, 0.25, uses_cores=uses_cores)]
    machine = box(*["cpu"] * workers, links=links)
    tasks = plan_tree(chain((0, NBYTES)), machine, Tree(workers=workers), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(2 * (workers - 1) * 4.25)


def test_additions_of_cores_run_at_the_speed_of_the_memory_and_not_of_layers():
    own, layers = ({"memory_bandwidth_bytes_per_s": rate} for rate in (6000.0, 1.0))
    machine = box("cpu", "cpu", links=[link("h", "h", 1e18)], host=own, device=layers)
    tasks = plan_tree(chain((0, NBYTES)), machine, Tree(), Window(1))
    assert exchange_s(tasks, machine) == pytest.approx(2.0)


def test_every_worker_updates_when_it_has_the_means_and_has_passed_them_on():
    tasks = plan_tree(chain((1, NBYTES)), gpus(4), Tree(workers=4), Window(2))
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
