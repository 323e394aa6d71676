"""Plans of allreduce against closed forms: buckets, rings of hosts and GPUs, rails."""

from collections import Counter
from itertools import combinations, pairwise, permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, chain, codec_speed, link, ring
from paceline.core.cluster import Cluster
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind, Task, TaskId
from paceline.core.ring_search import rings_at_once
from paceline.core.simulate import period, simulate
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, rings
from paceline.core.workload import Layer, Parameter
from paceline.records.catalogue import by_name, known_link
from paceline.records.machine_file import read_machine
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import buckets, plan
from refusals import refused

MIB = 2**20


def layer(name: str, *mib: float) -> Layer:
    parameters = tuple(
        Parameter(f"{name}.{i}", (int(size * MIB) // 4,)) for i, size in enumerate(mib)
    )
    return Layer(name, parameters, 0, Cost(), Cost())


def ring_of(num_hosts: int, **link_facts) -> Machine:
    """One core a host, all hosts in a ring of 1 GB/s and 10 us."""
    names = "abcdefgh"[:num_hosts]
    return box(*["cpu"] * num_hosts, hosts=names, links=ring(names, 1e9, 1e-5, **link_facts))


def test_buckets_follow_gradients_and_the_first_is_small():
    parts = buckets([layer("fc", 0.5, 4), layer("conv2", 20), layer("conv1", 6, 1)], None)
    found = [(part.nbytes / MIB, part.last_layer) for part in parts]
    assert found == [(4.5, "fc"), (26, "conv1"), (1, "conv1")]
    # With a given size all buckets have it.
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
    assert parts[-1].last_layer == ready[-1].name


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_an_exchange_that_nothing_hides_takes_the_time_of_a_ring(num_workers):
    # One layer: its gradient is ready only when backward is over.
    work, machine = chain((2, 100 * MIB)), ring_of(num_workers)
    ring_s = 2 * (num_workers - 1) * (100 * MIB / num_workers / 1e9 + 1e-5)
    config = AllReduce(workers=num_workers)
    step_s = period(lambda n: plan(work, machine, config, Window(n)), Roofline.of(machine), 3)
    assert step_s == pytest.approx(2 + ring_s + 4 * work.num_parameters / 1e9, rel=1e-9)


@pytest.mark.parametrize(("uses_cores", "shown_mib"), [(False, 0.25), (True, 1000.25)])
def test_buckets_hide_behind_earlier_layers_unless_cores_carry_them(uses_cores, shown_mib):
    # The last layer's exchange of 1 s runs during the 20 s of the first one's backward.
    work, machine = chain((20, MIB // 4), (2, 1000 * MIB)), ring_of(2, uses_cores=uses_cores)
    timeline = simulate(plan(work, machine, AllReduce(), Window(1)), Roofline.of(machine))
    num_messages = 4 if uses_cores else 2
    expected = 22 + 4 * work.num_parameters / 1e9 + shown_mib * MIB / 1e9 + num_messages * 1e-5
    assert timeline.makespan_s == pytest.approx(expected, rel=1e-9)


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


NBYTES = 10e9


def cluster(rails: int, hosts: int) -> Cluster:
    named = by_name(f"{hosts}x8xa100-40gb+{rails}xib-hdr")
    assert isinstance(named, Cluster)
    return named


def ring_s(machine: Machine) -> float:
    return Ring.at_once(machine, machine.first_devices(machine.num_devices), ()).seconds(NBYTES)


def reached(name: str) -> float:
    known = known_link(name)
    return known.share * known.bandwidth_bytes_per_s


@given(hosts=st.integers(2, 4), rails=st.integers(1, 16))
def test_rings_take_all_rails_or_what_joins_the_gpus_of_a_host(hosts: int, rails: int) -> None:
    ranks = 8 * hosts
    declared = cluster(rails, hosts)
    machine = declared.for_workers(ranks).reached
    # Every host sends 2 (n - 1) / n of the bytes to the next, and every GPU as many over NVLink.
    sent = 2 * (ranks - 1) / ranks * NBYTES
    # One adapter that reads the memory of GPUs is not slowed by their bus.
    rate = min(rails * reached("ib-hdr"), reached("nvlink3"))
    assert reached("ib-hdr") > reached("pcie4")
    assert machine.reached.links == machine.links  # once and not twice
    assert ring_s(machine) == pytest.approx(sent / rate, rel=0.01)
    # A host that stands for many exchanges as all that are listed.
    assert ring_s(declared.for_workers(ranks, True).reached) == pytest.approx(ring_s(machine))
    route = Ring.at_once(machine, machine.first_devices(ranks), ()).reduction(NBYTES)
    assert route.cost.nbytes <= sent  # on the busiest of the links, which one of the rails is


def test_messages_and_exchanges_of_hosts_take_one_adapter() -> None:
    one, many = (cluster(rails, 4).for_workers(32).reached for rails in (1, 8))
    for ours in (one, many):
        found = rings(ours, ours.hosts, ours.devices)[0].seconds(NBYTES)
        assert found == pytest.approx(2 * 3 / 4 * NBYTES / reached("ib-hdr"), rel=0.01)
    first, other = (Ring.over(ours, ours.devices, ()).seconds(NBYTES) for ours in (one, many))
    assert first == pytest.approx(other)


@pytest.mark.parametrize(
    ("kind", "network", "nbytes_per_s"),
    [
        ("cpu", {"nbytes_per_s": 1e9, "rails": 4}, 1e9),  # rings of cores take one adapter
        # Adapters of GPUs are beside their links with their hosts: past these.
        ("gpu", {"nbytes_per_s": 2e9, "rails": 4}, 8e9),
        ("gpu", {"nbytes_per_s": 8e9}, 3e9),  # without RDMA the bus of one GPU carries all
    ],
)
def test_a_listed_link_has_rails_too(kind: str, network: dict, nbytes_per_s: float) -> None:
    links = [link("gpu0", "a", 3e9), link("gpu1", "b", 3e9)] if kind == "gpu" else []
    machine = box(kind, kind, hosts="ab", links=[*links, link("a", "b", **network)])
    assert ring_s(machine) == pytest.approx(NBYTES / nbytes_per_s)


@pytest.mark.parametrize(
    ("links", "field"),
    [
        ([link("gpu0", "gpu1", 1e9, rails=2)], "gpu0--gpu1.rails"),
        ([link("gpu0", "h", 1e9, rails=2), link("gpu1", "h", 1e9)], "gpu0--h.rails"),
        ([link("gpu0", "h", 1e9), link("h", "h", 1e9, rails=2)], "h--h.rails"),
        ([link("gpu0", "h", 1e9, rdma=True), link("gpu1", "h", 1e9)], "gpu0--h.rdma"),
    ],
)
def test_links_within_a_host_have_none(links: list[dict], field: str) -> None:
    with pytest.raises(ValueError, match=f"links.{field}: "):
        box("gpu", "gpu", links=links)


@pytest.mark.parametrize("name", ["8xv100+2x25gbe", "2x8xv100+0x25gbe", "2x8xv100+65x25gbe"])
def test_rails_that_mean_nothing_are_refused(name: str) -> None:
    with refused("machine") as caught:
        by_name(name)
    assert f"{name}: rails" in caught.value.problem


def meshed(num_gpus: int, widths: dict[tuple[int, int], int]):
    """Return GPUs with numbers of links of 1 GB/s between pairs."""
    links = [link(f"gpu{a}", f"gpu{b}", count * 1e9) for (a, b), count in widths.items()]
    links += [link(f"gpu{i}", "a", 1e8) for i in range(num_gpus)]
    return box(*["gpu"] * num_gpus, hosts="a" * num_gpus, links=links)


def test_a_dgx1_has_six_rings_as_in_the_catalogue_and_its_halves_four() -> None:
    machine, equal = read_machine(Path("machines/dgx1-v100.toml")), by_name("8xv100")
    for gpus, num_rings in ((3, 2), (4, 4), (8, 6)):
        devices = machine.devices[:gpus]
        found = rings_at_once(machine, devices)
        assert len(found) == num_rings
        assert all(sorted(order, key=devices.index) == list(devices) for order in found)
        # Each way of each link is taken at most as often as there are NVLinks of 25 GB/s.
        names = [[station.name for station in (*order, order[0])] for order in found]
        for ends, times in Counter(step for order in names for step in pairwise(order)).items():
            (one,) = (one for one in machine.links if set(one.between) == set(ends))
            assert times <= one.bandwidth_bytes_per_s / 25e9
    # Six NVLinks of 25 GB/s: the same number that the catalogue takes from NVIDIA for eight V100.
    explicit, catalogued = (Ring.at_once(one, one.devices, ()) for one in (machine, equal))
    assert explicit.seconds(NBYTES) == pytest.approx(2 * 7 / 8 * NBYTES / 150e9, rel=0.01)
    assert catalogued.seconds(NBYTES) == pytest.approx(explicit.seconds(NBYTES), rel=0.01)
    # The task in a plan takes as long.
    task = Task(TaskId(0, Kind.REDUCE), *explicit.reduction(NBYTES))
    assert Roofline.of(machine).seconds(task) == pytest.approx(explicit.seconds(NBYTES))


@st.composite
def meshes(draw):
    num_gpus = draw(st.integers(3, 5))
    pairs = list(combinations(range(num_gpus), 2))
    counts = draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs)))
    return num_gpus, {pair: n for pair, n in zip(pairs, counts, strict=True) if n}


@given(meshes())
def test_no_more_rings_can_be_found_by_trying_all(mesh) -> None:
    num_gpus, counts = mesh
    if not counts:
        return
    narrowest = min(counts.values())
    spare = {frozenset(pair): n // narrowest for pair, n in counts.items()}
    cycles = [
        Counter(map(frozenset, pairwise((0, *order, 0))))
        for order in permutations(range(1, num_gpus))
        if order[0] < order[-1]
    ]

    def most(left: dict[frozenset[int], int], start: int) -> int:
        best = 0
        for number in range(start, len(cycles)):
            after = {pair: n - cycles[number][pair] for pair, n in left.items()}
            known = cycles[number].keys() <= left.keys()
            if known and min(after.values()) >= 0:
                best = max(best, 1 + most(after, number))
        return best

    machine = meshed(num_gpus, counts)
    assert len(rings_at_once(machine, machine.devices)) == 2 * most(spare, 0)


def test_gpus_without_direct_links_and_cores_form_one_ring_as_listed() -> None:
    machine = meshed(3, {(0, 1): 1, (1, 2): 1})  # no ring: 0 and 2 meet at the host
    assert rings_at_once(machine, machine.devices) == []
    ring = Ring.at_once(machine, machine.devices, ())
    assert len(ring.routes) == 3
    cores = box("cpu", "cpu", "cpu", hosts="abc", links=[])
    assert rings_at_once(cores, cores.devices) == []
