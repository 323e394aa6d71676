"""Clusters planned with one representative node, and exchanges of groups of hosts."""

from collections import Counter
from itertools import combinations
from math import prod

import pytest
from pydantic import ValidationError

from boxes import (
    FACT,
    ExchangeOnly,
    WithoutUpdate,
    after,
    box,
    chain,
    codec_speed,
    exchange_s,
    link,
    named,
)
from findings import numbers
from paceline.core.cluster import Cluster, Symmetric
from paceline.core.cost import Roofline, update_cost
from paceline.core.machine import Machine
from paceline.core.plan import COMMUNICATION, Plan
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.planner import search
from paceline.strategies import find_exchange, find_strategy
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.hierarchy.plan import memory, variants
from paceline.strategies.hierarchy.plan import plan as plan_hierarchy
from refusals import refused

CODECS = {"eightbit": codec_speed(1e7, 2e7, 1e-4)}


def level(name: str, count: int, nbytes_per_s: float, latency_s: float = 0.0, **more) -> dict:
    fact = link("", "", nbytes_per_s, latency_s) | {"name": name, "count": count} | more
    return {key: value for key, value in fact.items() if key != "between"}


RACKS = (
    level("rack", 2, 1e6, 1e-4),
    level("row", 3, 1.5e6, 2e-4),
    level("hall", 4, 5e6, 3e-4, oversubscription=2),
)


def cluster(kind: str = "gpu", per_node: int = 4, levels=RACKS) -> Cluster:
    """Return nodes of GPUs with a link each, or of CPU workers that exchange in memory."""
    gpus = [link(f"gpu{i}", "n", 2e6 + 1e5 * i, 1e-5) for i in range(per_node)]
    links = gpus if kind == "gpu" else [link("n", "n", 3e6, 1e-5)]
    host = {"reduce_latency_s": 1e-4, "memory_bandwidth_bytes_per_s": 1e7, "codecs": CODECS}
    devices, facts = [kind] * per_node, {"codecs": CODECS}
    node = box(*devices, hosts="n" * per_node, links=links, host=host, device=facts)
    return Cluster.model_validate(node.model_dump() | {"levels": list(levels)})


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
    return lambda n: strategy.planning.plan(work, machine, config, Window(n))


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
def test_a_plan_of_one_representative_node_equals_the_plan_of_all_nodes(name, workers, kind):
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
    strategy, options = find_strategy(name.split()[0]), STRATEGIES[name]
    if strategy.planning.memory is not None:
        config = strategy.config(workers=workers, **options)
        memory = strategy.planning.memory
        needed, of_all = (memory(WORK, machine, config) for machine in (alike, every))
        assert needed.items() <= of_all.items()
        assert set(needed.values()) == set(of_all.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_size_of_a_plan_does_not_depend_on_the_number_of_nodes(name):
    whole = cluster(levels=[level("rack", 32, 1e6), level("row", 64, 32e6), level("hall", 64, 1e9)])
    small, large = (
        len(planned(whole.for_workers(n, symmetric=True), name, n)(1)) for n in (4 * 2048, 2**19)
    )
    assert large <= small * 1.5


def test_hosts_below_a_switch_share_its_link():
    # Groups of 2, 3 and 4 hosts exchange S bytes. On the second level a host has S/2 bytes, and
    # 2 hosts share 1.5 MB/s. On the third level it has S/6 bytes, and 6 hosts share 2.5 MB/s.
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


def test_nodes_are_filled_in_order_and_unused_switches_are_left_out():
    node = cluster().model_dump()
    node["switches"] = [{"name": "crossbar", "source": "made up"}]
    node["links"] += tuple(link(f"gpu{i}", "crossbar", 1e9) for i in range(4))
    whole = Cluster.model_validate(node)
    part = whole.for_workers(21)
    within = [f"n{i}.crossbar" for i in range(6)]
    used = ["rack0", "rack1", "rack2", "row0"]
    assert {switch.name for switch in part.switches} == {*within, *used}
    assert [one.name for one in part.first_devices(6)][3:] == ["n0.gpu3", "n1.gpu0", "n1.gpu1"]
    for ends, way in (
        ((part.hosts[0], part.hosts[5]), ["rack0", "row0", "rack2", "n5"]),
        ((part.devices[4], part.devices[6]), ["n1.crossbar", "n1.gpu2"]),
    ):
        assert [hop.target for hop in part.route(*ends)] == way
    assert [switch.name for switch in whole.for_workers(4).switches] == within[:1]
    # A machine that is no cluster is returned unchanged.
    assert part.for_workers(3, symmetric=True) is part


BIG = cluster(levels=[level("rack", 30, 1e6), level("row", 32, 1e6)])


@pytest.mark.parametrize(
    ("workers", "symmetric", "figures"),
    [
        (0, True, "1 to 3840"),
        (5000, True, "1 to 3840"),
        (130, True, "128 or 132"),  # 130 workers do not fill nodes
        (516, False, "512"),  # too many for a plan with tasks of every worker
    ],
)
def test_numbers_of_workers_that_cannot_be_planned_are_refused(workers, symmetric, figures):
    with refused("workers") as caught:
        BIG.for_workers(workers, symmetric)
    assert figures in str(caught.value)


def test_a_strategy_without_symmetry_is_planned_on_many_workers_only_if_requested():
    """A plan of strategy tree has tasks of every worker, so large plans are slow."""

    def found(batch_size: int, asked: int | None, num_layers: int = 2):
        work = chain(*[(0.01, 4000)] * num_layers)
        return search(lambda _: work, BIG, [find_exchange("tree")], batch_size, asked)

    assert [one.workers for one in found(256, 256)] == [256]
    unasked = found(512, None)
    assert max(one.workers for one in unasked) == 128
    assert {one.workers for one in unasked.refused} == {256, 512}
    for workers, num_layers, most in ((512, 100, 327), (1000, 2, 512)):
        (refusal,) = found(1024, workers, num_layers).refused
        assert {workers, most} <= set(numbers(refusal.why))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"levels": [level("rack", 0, 1e6)]}, ("levels", 0, "count")),
        ({"levels": [level("r", 8, 1e6, oversubscription=0.5)]}, ("levels", 0, "oversubscription")),
        ({"levels": [level("n", 8, 1e6)]}, ()),  # the node's host has this name
        ({"levels": []}, ("levels",)),
        ({"groups": [1]}, ()),
        ({"hosts": [FACT | {"name": name, "cores": 2} for name in "ab"], "devices": []}, None),
    ],
)
def test_an_invalid_cluster_is_refused_with_its_field(change, place):
    with pytest.raises(ValidationError) as caught:
        Cluster.model_validate(cluster().model_dump() | change)
    assert place is None or place in {one["loc"] for one in caught.value.errors()}


NBYTES = 4000
HOSTS = "abcdefghi"


def grouped(groups: list[int], pace: float = 1e3, latency_s: float = 0.0, **host) -> Machine:
    """Return hosts with a CPU worker each, and a link between each pair of hosts."""
    names = HOSTS[: prod(groups)]
    links = [link(*pair, pace, latency_s) for pair in combinations(names, 2)]
    machine = box(*["cpu"] * len(names), hosts=names, links=links, host=host or None)
    return Machine.model_validate(machine.model_dump() | {"groups": groups})


def seconds(machine: Machine, nbytes: int, **config) -> float:
    options = Hierarchy(workers=len(machine.devices), **config)
    return exchange_s(plan_hierarchy(chain((0, nbytes)), machine, options, Window(1)), machine)


def test_exchanges_between_hosts_have_exactly_these_tasks_and_hide_behind_backward():
    machine, work = grouped([2, 2]), chain((0, NBYTES))
    found = named(plan_hierarchy(work, machine, Hierarchy(4), Window(1)))
    sends = {f"send[0.{way}]" for way in ("out0", "out1", "in1", "in0")}
    assert {name for name in found if "@" not in name} == {"reduce[0]"} | sends
    served = plan_hierarchy(work, machine, Hierarchy(4, between="servers"), Window(1))
    assert named(served) - found == {f"reduce[0.{part}]" for part in ("add0", "add1", "update")}
    assert served["s0/step@worker0"].cost == update_cost(work)
    assert set(after(served["s0/step@worker3"])) >= {"s0/send[0.in0]"}
    assert [one.between for one in variants(4)] == ["rings", "servers"]
    # The last layer's messages take 6 s and hide; the first layer sends almost nothing.
    layers, config = chain((20, 4), (20, NBYTES)), Hierarchy(workers=4)
    repeated = lambda n: plan_hierarchy(layers, machine, config, Window(n))  # noqa: E731
    assert period(repeated, WithoutUpdate(machine), 3) == pytest.approx(40, rel=1e-3)


def test_servers_add_and_update_their_share_and_send_at_once():
    # Groups of 2 hosts, then 2 groups: halves, then quarters; one message per way and level.
    machine = grouped([2, 2], 1e3, 0.5, memory_bandwidth_bytes_per_s=1e4)
    wire_s = 2 * (NBYTES / 2 + NBYTES / 4) / 1e3 + 4 * 0.5
    # Copy and sum on the host, sums of two halves and of two quarters, update of a quarter.
    traffic = (2 + 2) * NBYTES + 3 * NBYTES / 2 + 3 * NBYTES / 4 + 5 * NBYTES / 4
    found = seconds(machine, NBYTES, between="servers")
    assert found == pytest.approx(wire_s + traffic / 1e4, rel=1e-9)


@pytest.mark.parametrize(("num_hosts", "servers"), [(4, 4), (4, 2), (4, 1), (3, 1)])
def test_few_servers_are_the_bottleneck(num_hosts, servers):
    """The oracle is the closed form of the incast at the servers."""
    machine = grouped([num_hosts], memory_bandwidth_bytes_per_s=1e5)
    share = NBYTES / servers
    # The plan prices all messages of a server on the link to its neighbour.
    wire_s = 2 * (num_hosts - 1) * share / 1e3
    local_s = ((num_hosts + 1) * share + 5 * share) / 1e5
    sums_s = (2 * NBYTES + 2 * NBYTES) / 1e5  # a copy, and the sum's reads and writes
    found = seconds(machine, NBYTES, between="servers", servers=servers)
    assert found == pytest.approx(wire_s + local_s + sums_s, rel=1e-6)
    assert found >= seconds(machine, NBYTES, between="servers") * (1 - 1e-9)


@pytest.mark.parametrize(("groups", "servers"), [([2], 3), ([2, 2], 1)])
def test_servers_are_among_the_hosts_of_one_group(groups, servers):
    with refused("servers"):
        seconds(grouped(groups), NBYTES, between="servers", servers=servers)


def test_hosts_need_memory_for_gradients_and_for_parameters_of_servers():
    def needed(config: Hierarchy, num_hosts: int = 2) -> list[int]:
        found = memory(chain((0, NBYTES)), grouped([num_hosts]), config)
        return [found[host] for host in HOSTS[:num_hosts]]

    assert needed(Hierarchy()) == [2 * NBYTES] * 2  # gradients of one worker, and the sum
    served = 2 * NBYTES + 3 * NBYTES // 2
    few = Hierarchy(3, between="servers", servers=2)
    assert needed(few, 3) == [served, served, 2 * NBYTES]
    assert set(memory(chain((0, NBYTES)), box("cpu"), Hierarchy(workers=1))) == {"cpu0"}
