"""Clusters of equal nodes: one node stands for all, and links are shared below their switches."""

import subprocess
import sys
from collections import Counter
from math import prod
from pathlib import Path

import pytest
from pydantic import ValidationError

import boxes
from boxes import FACT, FLOPS_PER_S, ExchangeOnly, chain, codec_speed, link
from findings import numbers
from paceline.core.cluster import Cluster, Symmetric
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import COMMUNICATION, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.planner import search
from paceline.planner.search import forecast_one
from paceline.records.catalogue import known_link
from paceline.records.machine_file import find_machine, read_machine
from paceline.strategies import find_exchange, find_strategy
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.wheel.config import Wheel
from refusals import refused

CODECS = {"eightbit": codec_speed(1e7, 2e7, 1e-4)}


def level(name: str, count: int, nbytes_per_s: float, latency_s: float = 0.0, **more) -> dict:
    fact = {"bandwidth_bytes_per_s": nbytes_per_s, "latency_s": latency_s, "source": "made up"}
    return fact | {"name": name, "count": count} | more


RACKS = (
    level("rack", 2, 1e6, 1e-4),
    level("row", 3, 1.5e6, 2e-4),
    level("hall", 4, 5e6, 3e-4, oversubscription=2),
)


def cluster(kind: str = "gpu", per_node: int = 4, levels=RACKS) -> Cluster:
    """Nodes of GPUs, each behind its own link, or of cores that message through memory."""
    facts = {"kind": kind, "host": "n", "flops_per_s": FLOPS_PER_S, "codecs": CODECS}
    devices = [FACT | facts | {"name": f"{kind}{i}"} for i in range(per_node)]
    links = [link(device["name"], "n", 2e6 + 1e5 * i, 1e-5) for i, device in enumerate(devices)]
    computer = {"name": "n", "cores": 8, "reduce_latency_s": 1e-4, "codecs": CODECS}
    return Cluster.model_validate(
        {
            "name": "made",
            "hosts": [FACT | computer | {"memory_bandwidth_bytes_per_s": 1e7}],
            "devices": devices,
            "links": links if kind == "gpu" else [link("n", "n", 3e6, 1e-5)],
            "levels": list(levels),
        }
    )


STRATEGIES = {
    "allreduce": {"bucket_mb": 1},
    "allreduce dynamic8": {"codec": "dynamic8"},
    "host": {},
    "host dynamic8": {"chunk": 2, "codec": "dynamic8"},
    "hierarchy rings": {},
    "hierarchy servers": {"between": "servers"},
}
WORK = chain((0.01, 400_000), (0.02, 1_200_000), (0.005, 40_000), (0.01, 4_000))


def planned(machine: Machine, name: str, workers: int, work=WORK):
    strategy = find_strategy(name.split()[0])
    config = strategy.config(workers=workers, **STRATEGIES[name])
    return lambda n: strategy.plan(work, machine, config, Window(n))


def busiest(plan: Plan) -> float:
    load: Counter[str] = Counter()
    for task in plan.tasks:
        for resource in task.on:
            if resource.lane == "wire" and task.kind in COMMUNICATION:
                load[resource.owner] += task.cost.nbytes
    return max(load.values(), default=0.0)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("workers", [1, 4, 8, 20, 24, 48])
def test_one_node_stands_for_all_equal_ones(name, workers, kind):
    # 20 workers fill racks unequally, 24 a row, and 48 two rows.
    whole = cluster(kind)
    alike, every = whole.for_workers(workers, symmetric=True), whole.for_workers(workers)
    assert isinstance(alike, Symmetric) == (workers > 4)
    one, all_ = planned(alike, name, workers), planned(every, name, workers)
    expected = period(all_, Roofline.of(every), 3)
    assert period(one, Roofline.of(alike), 3) == pytest.approx(expected, rel=1e-9)
    assert busiest(one(2)) == pytest.approx(busiest(all_(2)), rel=1e-9)
    if workers > 4:
        assert len(one(2)) < len(all_(2))


@pytest.mark.parametrize("workers", [8, 24, 48])
@pytest.mark.parametrize("between", ["rings", "servers"])
def test_what_the_representatives_need_is_what_each_needs(workers, between):
    config, memory = Hierarchy(workers=workers, between=between), find_strategy("hierarchy").memory
    found, expected = (
        memory(WORK, cluster().for_workers(workers, symmetric), config)
        for symmetric in (True, False)
    )
    assert found.items() <= expected.items()
    assert set(expected.values()) == set(found.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_size_of_a_plan_does_not_depend_on_the_number_of_nodes(name):
    whole = cluster(levels=[level("rack", 32, 1e6), level("row", 64, 32e6), level("hall", 64, 1e9)])
    small, large = (
        len(planned(whole.for_workers(n, symmetric=True), name, n)(1)) for n in (4 * 2048, 2**19)
    )
    assert large <= small * 1.5


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_way():
    # 48 cores: 94 messages in turn, each over six links of the three levels.
    alike = cluster("cpu").for_workers(48, symmetric=True)
    ring = Ring.over(alike, alike.first_devices(48), ())
    assert ring.num_ranks == 48
    latency_s = 2 * (1e-4 + 2e-4 + 3e-4)
    assert ring.seconds(48e6) == pytest.approx(94 * (latency_s + 1e6 / 1e6))


def test_hosts_below_a_switch_share_its_link():
    # Groups of 2, 3 and 4: of S bytes a host takes S/6 to the third level, whose links 6 hosts
    # share at 2.5 MB/s, and S/2 to the second, where 2 share 1.5 MB/s.
    workers, nbytes = 24, 24e6
    machine = cluster("cpu", per_node=1).for_workers(workers, symmetric=True)
    assert machine.groups == (2, 3, 4)
    plan = planned(machine, "hierarchy rings", workers, chain((0, int(nbytes))))(1)
    spans = {s.name: s.duration_s for s in simulate(plan, ExchangeOnly(machine)).spans}
    first = nbytes / 2 / 1e6 + 2 * 1e-4
    second = 2 / 3 * nbytes / 2 / (1.5e6 / 2) + 2 * 2 * (1e-4 + 2e-4)
    third = 3 / 4 * nbytes / 6 / (2.5e6 / 6) + 3 * 2 * (1e-4 + 2e-4 + 3e-4)
    for i, expected in enumerate((first, second, third)):
        for direction in ("out", "in"):
            found = spans[f"s0/send[0.{direction}{i}]"]
            assert found == pytest.approx(expected, rel=1e-9), (direction, i)


def test_nodes_are_filled_in_order_and_switches_are_there_as_far_as_they_are_used():
    whole = cluster()
    assert (whole.num_nodes, whole.num_devices) == (24, 96)
    part = whole.for_workers(21)
    assert [host.name for host in part.hosts] == [f"n{i}" for i in range(6)]
    assert [switch.name for switch in part.switches] == ["rack0", "rack1", "rack2", "row0"]
    devices = [device.name for device in part.first_devices(6)]
    assert devices[3:] == ["n0.gpu3", "n1.gpu0", "n1.gpu1"]
    way = part.route(part.hosts[0], part.hosts[5])
    assert [hop.target for hop in way] == ["rack0", "row0", "rack2", "n5"]
    assert not whole.for_workers(4).switches
    assert whole.for_workers(96, symmetric=True).groups == (2, 3, 4)
    # A machine that is no cluster is planned as it is.
    assert part.for_workers(3, symmetric=True) is part
    assert part.num_devices == 24


def test_what_is_inside_a_node_is_in_every_node():
    node = cluster().model_dump()
    node["switches"] = [{"name": "crossbar", "source": "made up"}]
    node["links"] += tuple(link(f"gpu{i}", "crossbar", 1e9) for i in range(4))
    part = Cluster.model_validate(node).for_workers(8)
    way = part.route(part.devices[4], part.devices[6])
    assert [hop.target for hop in way] == ["n1.crossbar", "n1.gpu2"]


BIG = cluster(levels=[level("rack", 30, 1e6), level("row", 32, 1e6)])


@pytest.mark.parametrize(
    ("workers", "symmetric", "figures"),
    [
        (0, True, "1 to 3840"),
        (5000, True, "1 to 3840"),
        (130, True, "128 or 132"),  # do not fill nodes
        (516, False, "512"),  # too many whose every task is planned
    ],
)
def test_what_cannot_be_planned_is_refused(workers, symmetric, figures):
    with refused("workers") as caught:
        BIG.for_workers(workers, symmetric)
    assert figures in str(caught.value)


def test_a_strategy_without_symmetry_is_planned_on_many_workers_that_are_asked_for():
    """Each worker of a tree has tasks of its own: unasked, planning them would take too long."""

    def found(batch_size: int, asked: int | None, num_layers: int = 2):
        work = chain(*[(0.01, 4000)] * num_layers)
        return search(lambda _: work, BIG, [find_exchange("tree")], batch_size, asked)

    assert [one.workers for one in found(256, 256)] == [256]
    unasked = found(512, None)
    assert max(one.workers for one in unasked) == 128
    assert {one.workers for one in unasked.refused} == {256, 512}
    for workers, num_layers, most in ((512, 100, 327), (1000, 2, 512)):
        (refusal,) = found(1024, workers, num_layers).refused
        assert numbers(refusal.why)[0] == workers
        assert most in numbers(refusal.why)


@pytest.mark.parametrize(
    ("child_hubs", "num_devices", "sent_by_hub"),
    [
        (0, 1 + 64 // 4, 64 * 4_000_000),  # the body's parameters, to each worker
        (8, 1 + 64 // 4 + 8, 8 * 4_004_000),  # all parameters, to each child
    ],
)
def test_many_workers_of_wheel_are_planned_on_a_machine_by_name(
    child_hubs: int, num_devices: int, sent_by_hub: int
):
    """They alternate by fours on 16 of the GPUs; in a tree each hub has one of its own, too."""
    work, machine = chain((0.01, 4_000_000), (0.01, 4000)), find_machine("8x8xv100+25gbe")
    config = Wheel(workers=64, lanes=4, head="l1", child_hubs=child_hubs)
    found = forecast_one(lambda _: work, machine, find_strategy("wheel"), config, 64)
    assert found.workers == 64
    assert len(found.memory_nbytes) == num_devices
    assert found.link_nbytes["host0.gpu0->host0"] == sent_by_hub
    if not child_hubs:  # seven of the 16 stand beside the hub's
        away = 4_000_000 * (64 - 7 * 4)
        assert found.link_nbytes["host0->switch0"] == away
        assert found.step_s > away / known_link("25gbe").bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"levels": [level("rack", 0, 1e6)]}, ("levels", 0, "count")),
        ({"levels": [level("rack", 8, -1.0)]}, ("levels", 0, "bandwidth_bytes_per_s")),
        ({"levels": [level("r", 8, 1e6, oversubscription=0.5)]}, ("levels", 0, "oversubscription")),
        ({"levels": [level("n", 8, 1e6)]}, ()),  # the name of the node
        ({"levels": []}, ("levels",)),
        ({"groups": [1]}, ()),
        ({"hosts": [FACT | {"name": name, "cores": 2} for name in "ab"], "devices": []}, None),
    ],
)
def test_what_is_no_cluster_is_refused_with_its_field(change, place):
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate(cluster().model_dump() | change)
    assert place is None or place in {one["loc"] for one in caught.value.errors()}


PLAN_ALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from boxes import chain
from paceline.core.compare import breakdown
from paceline.core.cost import Roofline
from paceline.core.simulate import period, simulate
from paceline.records.machine_file import read_machine
from test_cluster import STRATEGIES, planned
machine = read_machine(Path("machines/cluster-16384.toml")).for_workers(16384, symmetric=True)
cost, work = Roofline.of(machine), chain(*[(0.0001, 1_000_000)] * 100)
for name in STRATEGIES:
    if "dynamic8" not in name:
        plan_of = planned(machine, name, 16384, work)
        seconds = period(plan_of, cost, 8)
        breakdown(simulate(plan_of(8), cost))
        print(name, seconds, sep="=")
"""


@pytest.mark.slow
def test_sixteen_thousand_workers_are_planned_in_two_gibibytes():
    folders = {str(Path(file).parent) for file in (__file__, boxes.__file__)}
    command = [sys.executable, "-c", PLAN_ALL, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found = {name: float(s) for name, s in (line.split("=") for line in done.stdout.splitlines())}
    assert set(found) == {"allreduce", "host", "hierarchy rings", "hierarchy servers"}
    # 2,047 x 2 latencies of a ring over all nodes, for each of 100 chunks that follow one another.
    latencies_s = 2 * 2047 * 2 * (1e-6 + 0.5e-6 + 0.5e-6) * 100
    assert found["host"] > latencies_s
    assert found["hierarchy rings"] < found["host"] / 10
    machine = read_machine(Path("machines/cluster-16384.toml"))
    assert machine.num_devices == prod((32, 4, 16, 8)) == 16384
