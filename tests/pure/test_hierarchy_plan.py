"""Rings and servers of groups of hosts against closed forms."""

from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from boxes import WithoutUpdate, after, box, chain, exchange_s, link, named
from paceline.core.compare import breakdown
from paceline.core.cost import Roofline, update_cost
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Task, TaskId
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.hierarchy.plan import memory, plan, variants
from refusals import refused

NBYTES = 4000
HOSTS = "abcdefghi"


def all_linked(num_hosts: int, nbytes_per_s: float, latency_s: float = 0.0) -> list[dict]:
    names = HOSTS[:num_hosts]
    pairs = [(one, other) for one in names for other in names if one < other]
    return [link(*pair, nbytes_per_s, latency_s) for pair in pairs]


def grouped(groups: list[int], pace: float = 1e3, latency_s: float = 0.0, **host) -> Machine:
    """One core on each host; all hosts have links with each other."""
    names = HOSTS[: prod(groups)]
    links = all_linked(len(names), pace, latency_s)
    machine = box(*["cpu"] * len(names), hosts=names, links=links, host=host or None)
    return Machine.model_validate(machine.model_dump() | {"groups": groups})


def seconds(machine: Machine, nbytes: int, **config) -> float:
    options = Hierarchy(workers=len(machine.devices), **config)
    return exchange_s(plan(chain((0, nbytes)), machine, options, Window(1)), machine)


def test_these_tasks_and_no_others_lie_between_hosts():
    machine, work = grouped([2, 2]), chain((0, NBYTES))
    found = named(plan(work, machine, Hierarchy(4), Window(1)))
    sends = {f"send[0.{way}]" for way in ("out0", "out1", "in1", "in0")}
    assert {name for name in found if "@" not in name} == {"reduce[0]"} | sends
    served = plan(work, machine, Hierarchy(4, between="servers"), Window(1))
    assert named(served) - found == {f"reduce[0.{part}]" for part in ("add0", "add1", "update")}
    assert served["s0/step@worker0"].cost == update_cost(work)
    assert set(after(served["s0/step@worker3"])) >= {"s0/send[0.in0]"}
    assert [one.between for one in variants(4)] == ["rings", "servers"]


@given(
    st.lists(st.integers(2, 3), min_size=1, max_size=2),
    st.integers(1, 10**6),
    st.floats(0, 1e-2),
    st.floats(1e3, 1e9),
)
def test_rings_of_groups_move_as_much_as_one_ring_in_fewer_messages(sizes, count, latency_s, pace):
    # With links of their own between all hosts, n hosts send 2 (n - 1) / n of the bytes each.
    n = prod(sizes)
    num_messages = 2 * sum(size - 1 for size in sizes)
    expected = 2 * (n - 1) / n * 4 * count / pace + num_messages * latency_s
    copies_s = 2 * 4 * count / 1e18 + 2 * 4 * count / 1e18
    found = seconds(grouped(sizes, pace, latency_s), 4 * count)
    assert found == pytest.approx(expected + copies_s, rel=1e-6)


def test_servers_add_and_update_their_share_and_send_at_once():
    # Groups of 2, then 2: halves of all, then of the half; a message each way and level.
    machine = grouped([2, 2], 1e3, 0.5, memory_bandwidth_bytes_per_s=1e4)
    wire_s = 2 * (NBYTES / 2 + NBYTES / 4) / 1e3 + 4 * 0.5
    # Copy in, sum of one, then of two halves and of two quarters, and the update of a quarter.
    traffic = (2 + 2) * NBYTES + 3 * NBYTES / 2 + 3 * NBYTES / 4 + 5 * NBYTES / 4
    found = seconds(machine, NBYTES, between="servers")
    assert found == pytest.approx(wire_s + traffic / 1e4, rel=1e-9)


@pytest.mark.parametrize(("num_hosts", "servers"), [(4, 4), (4, 2), (4, 1), (3, 1)])
def test_few_servers_are_the_bottleneck(num_hosts, servers):
    """The incast in closed form: what a server gets, adds, updates and sends back."""
    machine = grouped([num_hosts], memory_bandwidth_bytes_per_s=1e5)
    share = NBYTES / servers
    # The ring's links lead to one neighbour: what a server gets goes over its own link.
    wire_s = 2 * (num_hosts - 1) * share / 1e3
    local_s = ((num_hosts + 1) * share + 5 * share) / 1e5
    sums_s = (2 * NBYTES + 2 * NBYTES) / 1e5  # copied to its place, and read and written as a sum
    found = seconds(machine, NBYTES, between="servers", servers=servers)
    assert found == pytest.approx(wire_s + local_s + sums_s, rel=1e-6)
    assert found >= seconds(machine, NBYTES, between="servers") * (1 - 1e-9)


def test_memory_is_that_of_replicas_and_of_gradients_and_parameters_on_hosts():
    def needed(config: Hierarchy, num_hosts: int = 2) -> list[int]:
        found = memory(chain((0, NBYTES)), grouped([num_hosts]), config)
        return [found[host] for host in HOSTS[:num_hosts]]

    assert needed(Hierarchy()) == [2 * NBYTES] * 2  # one worker's gradients and the sum
    served = 2 * NBYTES + 3 * NBYTES // 2
    assert needed(Hierarchy(between="servers")) == [served] * 2
    few = Hierarchy(3, between="servers", servers=2)
    assert needed(few, 3) == [served, served, 2 * NBYTES]
    assert set(memory(chain((0, NBYTES)), box("cpu"), Hierarchy(workers=1))) == {"cpu0"}


def test_servers_are_among_the_hosts_of_one_group():
    for groups, servers in (([2], 3), ([2, 2], 1)):
        config = Hierarchy(prod(groups), between="servers", servers=servers)
        with refused("servers"):
            plan(chain((1, 4)), grouped(groups), config, Window(1))


def test_on_one_host_servers_only_update():
    machine = box("cpu", "cpu", host={"memory_bandwidth_bytes_per_s": 1e3})
    rings, served = (seconds(machine, NBYTES, between=way) for way in ("rings", "servers"))
    assert served - rings == pytest.approx(5 * NBYTES / 1e3)


def test_sums_hide_behind_backward_chunk_by_chunk_and_show_after_it():
    machine = grouped([2, 2])
    cost = WithoutUpdate(machine)

    def window(num_steps):
        return plan(chain((20, 4), (20, NBYTES)), machine, Hierarchy(workers=4), Window(num_steps))

    # The last layer's 6 s of messages hide; the first has next to nothing to send.
    assert period(window, cost, 3) == pytest.approx(40, rel=1e-3)
    parts = breakdown(
        simulate(plan(chain((20, NBYTES)), machine, Hierarchy(workers=4), Window(3)), cost)
    )
    assert (parts.exposed_s, parts.idle_s) == pytest.approx((6.0, 0.0), abs=1e-6)


def test_a_way_that_is_shared_before_its_narrowest_hop_is_priced_by_the_slower():
    # Two pairs of neighbours share a wide hop, which then is slower than the narrow one.
    links = [link(f"gpu{i}", "xy"[i % 2], 10.0) for i in range(4)] + [link("x", "y", 15.0)]
    switches = [{"name": name, "source": "-"} for name in "xy"]
    values = box(*["gpu"] * 4).model_dump() | {"links": links, "switches": switches}
    machine = Machine.model_validate(values)
    ring = Ring.over(machine, machine.devices, ())
    on, cost = ring.reduction(60.0)
    # Each of four sends 6 messages of 15 bytes, and two of them go from x to y.
    assert ring.seconds(60.0) == pytest.approx(6 * 15 * 2 / 15)
    priced = Roofline.of(machine).seconds(Task(TaskId(0, Kind.REDUCE), on, cost))
    assert priced == pytest.approx(ring.seconds(60.0))


RATES = st.floats(1e6, 1e12)
LATENCIES = st.floats(0, 1e-3)


@st.composite
def machines(draw) -> Machine:
    """Hosts of one to three devices, joined by links of their own, in one level or two."""
    sizes = draw(st.sampled_from([[], [2], [3], [2, 2]]))
    hosts, kind = HOSTS[: prod(sizes)], draw(st.sampled_from(["cpu", "gpu"]))
    places = [host for host in hosts for _ in range(draw(st.integers(1, 3)))]
    links = all_linked(len(hosts), draw(RATES), draw(LATENCIES))
    if kind == "gpu":
        facts = draw(RATES), draw(LATENCIES)
        links += [link(f"gpu{i}", place, *facts) for i, place in enumerate(places)]
    device = {
        "flops_per_s": draw(RATES),
        "memory_bandwidth_bytes_per_s": draw(RATES),
        "call_latency_s": draw(LATENCIES),
    }
    host = {"memory_bandwidth_bytes_per_s": draw(RATES), "reduce_latency_s": draw(LATENCIES)}
    machine = box(*[kind] * len(places), hosts=places, links=links, device=device, host=host)
    return Machine.model_validate(machine.model_dump() | {"groups": sizes})


@given(
    machines(),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 10**6)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([("rings", None), ("servers", None), ("servers", 1)]),
)
def test_n_workers_are_never_more_than_n_times_as_fast(machine, layers, chunk, way):
    """Whatever their hosts do for them: one worker alone pays for nothing that they do not."""
    between, servers = way
    assume(servers is None or len(machine.groups) == 1)
    work = chain(*((seconds, 4 * count) for seconds, count in layers))
    roofline = Roofline.of(machine)

    def step_s(workers: int) -> float:
        config = Hierarchy(workers, chunk, between, servers)
        return period(lambda n: plan(work, machine, config, Window(n)), roofline, 2)

    # Each has as many samples as one alone: n of them are n times as fast if a step is as long.
    assert step_s(len(machine.devices)) >= step_s(1) * (1 - 1e-9)
