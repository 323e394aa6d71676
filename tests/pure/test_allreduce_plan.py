"""Buckets of allreduce, and rings of hosts and GPUs against closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, chain, codec_speed, link, ring
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.workload import Layer, Parameter
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import buckets, plan

MIB = 2**20


def layer(name: str, *mib: float) -> Layer:
    parameters = tuple(
        Parameter(f"{name}.{i}", (int(size * MIB) // 4,)) for i, size in enumerate(mib)
    )
    return Layer(name, parameters, 0, Cost(), Cost())


def cluster(num_hosts: int, **link_facts) -> Machine:
    """One core a host, all hosts in a ring of 1 GB/s and 10 us."""
    names = "abcdefgh"[:num_hosts]
    return box(*["cpu"] * num_hosts, hosts=names, links=ring(names, 1e9, 1e-5, **link_facts))


def test_buckets_follow_gradients_and_the_first_is_small():
    parts = buckets([layer("fc", 0.5, 4), layer("conv2", 20), layer("conv1", 6, 1)], None)
    found = [(part.nbytes / MIB, part.last_layer) for part in parts]
    assert found == [(4.5, "fc"), (26, "conv1"), (1, "conv1")]


def test_a_given_bucket_size_is_that_of_every_bucket():
    ready = [layer("c", 6, 6), layer("b", 6, 6), layer("a", 6)]
    assert [part.nbytes / MIB for part in buckets(ready, 10)] == [12, 12, 6]
    assert [part.nbytes / MIB for part in buckets(ready, 1000)] == [30]


@given(
    st.lists(st.lists(st.floats(0.01, 40), min_size=1, max_size=3), min_size=1, max_size=12),
    st.none() | st.integers(1, 50),
)
def test_buckets_hold_every_gradient_once(sizes, bucket_mb):
    ready = [layer(f"l{i}", *mib) for i, mib in enumerate(sizes)]
    parts = buckets(ready, bucket_mb)
    assert sum(part.nbytes for part in parts) == sum(one.gradient_nbytes for one in ready)
    assert sum(part.num_parameters for part in parts) == sum(map(len, sizes))
    assert parts[-1].last_layer == ready[-1].name


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_an_exchange_that_nothing_hides_takes_the_time_of_a_ring(num_workers):
    # One layer: its gradient is ready only when backward is over.
    work, machine = chain((2, 100 * MIB)), cluster(num_workers)
    ring_s = 2 * (num_workers - 1) * (100 * MIB / num_workers / 1e9 + 1e-5)
    config = AllReduce(workers=num_workers)
    step_s = period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), 3)
    assert step_s == pytest.approx(2 + ring_s + 4 * work.num_parameters / 1e9, rel=1e-9)


@pytest.mark.parametrize(("uses_cores", "shown_mib"), [(False, 0.25), (True, 1000.25)])
def test_buckets_hide_behind_earlier_layers_unless_cores_carry_them(uses_cores, shown_mib):
    # The last layer's exchange of 1 s is beside the 20 s of the first one's backward.
    work, machine = chain((20, MIB // 4), (2, 1000 * MIB)), cluster(2, uses_cores=uses_cores)
    timeline = simulate(plan(work, machine, AllReduce(), Window(1)), Roofline.of(machine))
    num_messages = 4 if uses_cores else 2
    expected = 22 + 4 * work.num_parameters / 1e9 + shown_mib * MIB / 1e9 + num_messages * 1e-5
    assert timeline.makespan_s == pytest.approx(expected, rel=1e-9)


def test_ranks_on_one_host_share_its_link():
    machine = box("cpu", "cpu", links=[link("h", "h", 1e9)])
    tasks = plan(chain((0, 100 * MIB)), machine, AllReduce(), Window(1))
    # Each of the two sends all its bytes (2 (n - 1) / n of them), and both through one link.
    assert tasks["s0/reduce[0]"].cost.nbytes == 2 * 100 * MIB


@pytest.mark.parametrize(("bus", "network"), [(1e9, 1.25e11), (1e11, 1.25e8)])
def test_each_message_pays_the_latencies_of_all_links_on_its_way(bus, network):
    # Two messages: each over a bus with 10 us, a network with 5 ms, and a bus again.
    links = [link("gpu0", "a", bus, 1e-5), link("gpu1", "b", bus, 1e-5)]
    machine = box("gpu", "gpu", hosts="ab", links=[*links, link("a", "b", network, 5e-3)])
    task = plan(chain((0, MIB)), machine, AllReduce(), Window(1))["s0/reduce[0]"]
    expected = MIB / min(bus, network) + 2 * 5.02e-3
    assert Roofline.of(machine).seconds(task) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "workers", "codec", "times"),
    [
        ("cpu", 2, None, 2),
        ("cpu", 2, "dynamic8", 4),
        ("cpu", 1, "dynamic8", 0),
        ("gpu", 2, None, 0),  # which copy beside what limits them
    ],
)
def test_cores_copy_gradients_into_buckets_and_back(kind, workers, codec, times):
    speed = {"codecs": {"eightbit": codec_speed(1e9, 1e9)}}
    ends = ("gpu0", "gpu1") if kind == "gpu" else ("h", "h")
    machine = box(kind, kind, links=[link(*ends, 1e9)], device=speed)
    work = chain((0, MIB), (0, 2 * MIB))
    tasks = plan(work, machine, AllReduce(workers=workers, codec=codec), Window(1)).tasks
    traffic = {task.part: task.cost.nbytes for task in tasks if task.kind is Kind.BACKWARD}
    assert traffic == {"l0": times * MIB, "l1": times * 2 * MIB}
