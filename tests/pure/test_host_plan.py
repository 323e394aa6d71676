"""The host's exchange in chunks against closed forms: copies, sums, links and synchronisations."""

import pytest

from boxes import WithoutUpdate, after, box, chain, exchange_s, link, named
from paceline.core.compare import breakdown_by_device
from paceline.core.cost import Measured, Roofline
from paceline.core.plan import Kind, PriceKey
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.strategies.host.config import HostReduce
from paceline.strategies.host.plan import plan

NBYTES = 4000
GPU_LINKS = [link("gpu0", "h", 1000.0), link("gpu1", "h", 1000.0)]


def test_two_cpus_have_these_tasks_and_no_others():
    tasks = plan(chain((1, NBYTES), (1, NBYTES)), box("cpu", "cpu"), HostReduce(), Window(1))
    own = ("load", "forward[l0]", "forward[l1]", "backward[l1]", "backward[l0]", "step")
    ranks = {f"{name}@worker{w}" for name in (*own, "d2h[0]", "d2h[1]") for w in (0, 1)}
    assert named(tasks) == ranks | {"reduce[0]", "reduce[1]"}


def test_gpus_also_copy_back():
    tasks = plan(chain((1, NBYTES)), box("gpu", "gpu", links=GPU_LINKS), HostReduce(), Window(1))
    assert {"h2d[0]@worker0", "h2d[0]@worker1", "d2h[0]@worker0"} <= named(tasks)
    assert after(tasks["s0/step@worker1"])[0] == "s0/h2d[0]@worker1"


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
