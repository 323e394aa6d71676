"""Plans of strategies that exchange gradients in every step: all of them, and allreduce.

All strategies: one worker, refusals, and links fitted to measured exchanges. Allreduce against
closed forms: buckets, rings of hosts and GPUs, rails.
"""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from boxes import box, chain, codec_speed, exchange_s, link
from paceline.core.cluster import Cluster
from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.link_fit import ExchangeSample
from paceline.core.machine import Machine
from paceline.core.plan import Cost, Kind, Task, TaskId
from paceline.core.ring_search import rings_at_once
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, rings
from paceline.core.workload import Layer, Parameter
from paceline.records.catalogue import by_name, known_link
from paceline.records.machine_file import read_machine
from paceline.strategies import EXCHANGES, STRATEGIES
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import buckets, plan
from paceline.strategies.hierarchy.config import Hierarchy
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.host.config import HostReduce
from paceline.strategies.local.config import Local
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.tree.config import Tree
from paceline.strategies.wheel.config import Wheel
from refusals import refused

every_exchange = pytest.mark.parametrize("name", ["allreduce", "host", "tree", "hierarchy"])
WORK = chain((2, 400), (1, 4000))


@every_exchange
def test_one_worker_exchanges_nothing(name):
    known = STRATEGIES[name]
    tasks = known.planning.plan(WORK, box("cpu"), known.config(workers=1), Window(2)).tasks
    assert {task.kind for task in tasks} == {Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP}


@every_exchange
@pytest.mark.parametrize(
    ("workers", "kinds", "hosts", "field"),
    [
        (3, ["cpu", "cpu"], "hh", "workers"),
        (2, ["cpu", "cpu"], "ab", "machine box"),
        (2, ["gpu", "gpu"], "ab", "machine box"),
    ],
)
def test_a_machine_without_the_devices_or_links_is_refused(name, workers, kinds, hosts, field):
    known, machine = STRATEGIES[name], box(*kinds, hosts=hosts)
    with refused(field):
        known.planning.plan(WORK, machine, known.config(workers=workers), Window(1))


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        *[(config, {"workers": 0}) for config in (AllReduce, HostReduce, Tree, Hierarchy, Wheel)],
        *[(config, {"chunk": 0}) for config in (HostReduce, Hierarchy)],
        *[(AllReduce, {"bucket_mb": 0}), (AllReduce, {"buckets": 3}), (HostReduce, {"chunks": 3})],
        (Hierarchy, {"between": "trees"}),
        (Hierarchy, {"servers": 1}),  # requires between="servers"
        *[(Wheel, fields) for fields in ({"lanes": 0}, {"gradients": "zip"}, {"lane": 2})],
        *[(Hogbatch, {"cpu_batch": (64, 1)}), (Hogbatch, {"gpu_batch": (0, 8)})],
        *[(Hogbatch, fields) for fields in ({"alpha": 1.0}, {"beta": 0.0})],
        (Local, {"codec": "zip"}),
        *[
            (SubBatch, {field: codec})
            for field in ("activations", "activation_gradients")
            # Allowed are codecs of fixed size without error feedback.
            for codec in ("auto", "threshold:0.1", "zip", "onebit", "e3m0+feedback")
        ],
    ],
)
def test_invalid_settings_are_refused_by_name(config, fields):
    with pytest.raises((InvalidInput, ValidationError)) as caught:
        config(**fields)
    if isinstance(caught.value, InvalidInput):
        assert caught.value.field in {*fields, "codec"}
    else:
        (fault,) = caught.value.errors()
        assert fault["loc"] in {(next(iter(fields)),), ()}


SMALL, LARGE = 1024, 2**22


def measured(latency_s: float, seconds_per_byte: float) -> tuple[ExchangeSample, ExchangeSample]:
    return tuple(ExchangeSample(n, latency_s + n * seconds_per_byte) for n in (SMALL, LARGE))


def exchanging(machine: Machine, strategy: str, nbytes: int, **config):
    known = EXCHANGES[strategy]
    options = known.config(workers=len(machine.devices), **config)
    return known.planning.plan(chain((0, nbytes)), machine, options, Window(1))


@given(
    st.sampled_from(sorted(EXCHANGES)),
    st.sampled_from(["cpu", "gpu"]),
    st.sampled_from(["aa", "aaa", "a" * 8, "ab", "aab", "abbb", "aaabbb"]),
    st.floats(0, 50),  # latency, relative to the transfer time of the large exchange
    st.floats(1e-12, 1e-6),
    st.sampled_from([1e-18, 1e-9]),  # memory: seconds per byte
)
def test_workers_exchange_as_measured(strategy, kind, places, latency, s_per_byte, memory_s):
    latency_s = latency * LARGE * s_per_byte
    # Only CPU workers of one host transfer their messages, and so their sums, themselves.
    carried = kind == "cpu" and set(places) == {"a"}
    facts = {"memory_bandwidth_bytes_per_s": 1 / memory_s} if carried else {}
    machine = box(*[kind] * len(places), hosts=places, device=facts, host=facts)
    found = EXCHANGES[strategy].planning.calibrate(machine, measured(latency_s, s_per_byte))
    assert found.devices == machine.devices
    assert {one.uses_cores for one in found.links} == {carried}
    for nbytes in (SMALL, 100_000, LARGE, 20 * LARGE):
        expected = latency_s + nbytes * s_per_byte
        tasks = exchanging(found, strategy, nbytes)
        assert exchange_s(tasks, found) == pytest.approx(expected, rel=1e-9)


def test_the_time_of_additions_on_gpus_is_not_attributed_to_links():
    device = {"memory_bandwidth_bytes_per_s": 3e9, "call_latency_s": 1e-5}
    known = measured(0.1 * LARGE * 5e-9, 5e-9)
    found = EXCHANGES["tree"].planning.calibrate(box("gpu", "gpu", device=device), known)
    assert exchange_s(exchanging(found, "tree", LARGE), found) == pytest.approx(known[1].seconds)


@pytest.mark.parametrize("strategy", sorted(EXCHANGES))
@pytest.mark.parametrize("large_s", [1e-3, 0.5e-3, 1e-9])
def test_noise_that_makes_the_large_exchange_the_faster_gives_a_machine(strategy, large_s):
    noisy = (ExchangeSample(SMALL, 1e-3), ExchangeSample(LARGE, large_s))
    found = EXCHANGES[strategy].planning.calibrate(box("cpu", "cpu"), noisy)
    assert Machine.model_validate(found.model_dump()) == found
    assert exchange_s(exchanging(found, strategy, LARGE), found) > 0


@pytest.mark.parametrize("codec", ["half", "dynamic8", "e3m0", "onebit", "auto"])
@pytest.mark.parametrize("strategy", ["allreduce", "host"])
@pytest.mark.parametrize(("kind", "places"), [("cpu", "aa"), ("cpu", "aab"), ("gpu", "ab")])
def test_an_exchange_measured_with_a_codec_is_planned_with_that_time(strategy, kind, places, codec):
    known, machine = EXCHANGES[strategy], box(*[kind] * len(places), hosts=places)
    config = known.config(workers=len(places), codec=codec)
    calibrate, known_times = known.planning.calibrate, measured(3e-3, 2e-8)
    found, plain = (calibrate(machine, known_times, one) for one in (config, None))
    if strategy == "allreduce":
        with refused("codec"):  # only the measured codec is known
            exchanging(found, strategy, LARGE, codec="dynamic8" if codec == "onebit" else "onebit")
    for nbytes in (SMALL, LARGE, 20 * LARGE):  # the last one has several pieces
        tasks = exchanging(found, strategy, nbytes, codec=codec)
        # The recorder records whole exchanges, so the plan has the tasks of a plain exchange.
        without = exchanging(plain, strategy, nbytes)
        assert [task.id for task in tasks.tasks] == [task.id for task in without.tasks]
        # Incomplete blocks are rounded up.
        close = pytest.approx(3e-3 + nbytes * 2e-8, rel=1e-2 if nbytes == SMALL else 1e-3)
        assert exchange_s(tasks, found) == close


MIB = 2**20


def layer(name: str, *mib: float) -> Layer:
    parameters = tuple(
        Parameter(f"{name}.{i}", (int(size * MIB) // 4,)) for i, size in enumerate(mib)
    )
    return Layer(name, parameters, 0, Cost(), Cost())


def test_buckets_follow_gradients_and_the_first_is_small():
    parts = buckets([layer("fc", 0.5, 4), layer("conv2", 20), layer("conv1", 6, 1)], None)
    found = [(part.nbytes / MIB, part.last_layer) for part in parts]
    assert found == [(4.5, "fc"), (26, "conv1"), (1, "conv1")]
    # A configured size applies to the first bucket, too.
    ready = [layer("c", 6, 6), layer("b", 6, 6), layer("a", 6)]
    assert [part.nbytes / MIB for part in buckets(ready, 10)] == [12, 12, 6]
    assert [part.nbytes / MIB for part in buckets(ready, 1000)] == [30]


@pytest.mark.parametrize(("uses_cores", "shown_mib"), [(False, 0.25), (True, 1000.25)])
def test_buckets_hide_behind_earlier_layers_unless_cores_carry_them(uses_cores, shown_mib):
    # The last layer's exchange takes 1 s, during 20 s of the first layer's backward.
    links = [link("a", "b", 1e9, 1e-5, uses_cores=uses_cores)]
    machine = box("cpu", "cpu", hosts="ab", links=links)
    work = chain((20, MIB // 4), (2, 1000 * MIB))
    timeline = simulate(plan(work, machine, AllReduce(), Window(1)), Roofline.of(machine))
    num_messages = 4 if uses_cores else 2
    expected = 22 + 4 * work.num_parameters / 1e9 + shown_mib * MIB / 1e9 + num_messages * 1e-5
    assert timeline.makespan_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "workers", "codec", "times"),
    [
        ("cpu", 2, None, 2),
        ("cpu", 2, "dynamic8", 4),
        ("cpu", 1, "dynamic8", 0),
        ("gpu", 2, None, 0),  # the plan ignores copies on GPUs
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
def test_rings_use_all_rails_up_to_the_bandwidth_within_a_host(hosts: int, rails: int) -> None:
    ranks = 8 * hosts
    declared = cluster(rails, hosts)
    machine = declared.for_workers(ranks).reached
    # A host sends 2 (n - 1) / n of the bytes to the next host, and so does a GPU over NVLink.
    sent = 2 * (ranks - 1) / ranks * NBYTES
    # RDMA adapters read GPU memory directly, so the slower PCIe bus does not matter.
    rate = min(rails * reached("ib-hdr"), reached("nvlink3"))
    assert reached("ib-hdr") > reached("pcie4")
    assert machine.reached.links == machine.links  # `share` is applied only once
    assert ring_s(machine) == pytest.approx(sent / rate, rel=0.01)
    # One host that represents all of them takes as long as the full list of hosts.
    assert ring_s(declared.for_workers(ranks, True).reached) == pytest.approx(ring_s(machine))
    route = Ring.at_once(machine, machine.first_devices(ranks), ()).reduction(NBYTES)
    assert route.cost.nbytes <= sent  # bytes of the busiest link, which can be one rail


def test_messages_and_exchanges_between_hosts_use_one_adapter() -> None:
    one, many = (cluster(rails, 4).for_workers(32).reached for rails in (1, 8))
    for ours in (one, many):
        found = rings(ours, ours.hosts, ours.devices)[0].seconds(NBYTES)
        assert found == pytest.approx(2 * 3 / 4 * NBYTES / reached("ib-hdr"), rel=0.01)
    first, other = (Ring.over(ours, ours.devices, ()).seconds(NBYTES) for ours in (one, many))
    assert first == pytest.approx(other)


@pytest.mark.parametrize(
    ("kind", "network", "nbytes_per_s"),
    [
        ("cpu", {"nbytes_per_s": 1e9, "rails": 4}, 1e9),  # rings of CPU workers use one adapter
        # With several rails, adapters bypass the 3 GB/s link between a GPU and its host.
        ("gpu", {"nbytes_per_s": 2e9, "rails": 4}, 8e9),
        ("gpu", {"nbytes_per_s": 8e9}, 3e9),  # one rail without RDMA: the GPU's bus is the limit
    ],
)
def test_rails_of_a_single_link_limit_rings(kind: str, network: dict, nbytes_per_s: float) -> None:
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
def test_links_within_a_host_have_neither_rails_nor_rdma(links: list[dict], field: str) -> None:
    with pytest.raises(ValueError, match=f"links.{field}: "):
        box("gpu", "gpu", links=links)


@pytest.mark.parametrize("name", ["8xv100+2x25gbe", "2x8xv100+0x25gbe", "2x8xv100+65x25gbe"])
def test_invalid_numbers_of_rails_are_refused(name: str) -> None:
    with refused("machine") as caught:
        by_name(name)
    assert f"{name}: rails" in caught.value.problem


def test_a_dgx1_has_six_rings_as_in_the_catalogue_and_its_halves_four() -> None:
    machine, equal = read_machine(Path("machines/dgx1-v100.toml")), by_name("8xv100")
    for gpus, num_rings in ((3, 2), (4, 4), (8, 6)):
        devices = machine.devices[:gpus]
        found = rings_at_once(machine, devices)
        assert len(found) == num_rings
        assert all(sorted(order, key=devices.index) == list(devices) for order in found)
        # Each direction of a link carries at most one ring per NVLink of 25 GB/s.
        names = [[station.name for station in (*order, order[0])] for order in found]
        for ends, times in Counter(step for order in names for step in pairwise(order)).items():
            (one,) = (one for one in machine.links if set(one.between) == set(ends))
            assert times <= one.bandwidth_bytes_per_s / 25e9
    # Six NVLinks of 25 GB/s, which is also NVIDIA's figure in the catalogue for eight V100.
    explicit, catalogued = (Ring.at_once(one, one.devices, ()) for one in (machine, equal))
    assert explicit.seconds(NBYTES) == pytest.approx(2 * 7 / 8 * NBYTES / 150e9, rel=0.01)
    assert catalogued.seconds(NBYTES) == pytest.approx(explicit.seconds(NBYTES), rel=0.01)
    # The task in a plan has the same duration.
    task = Task(TaskId(0, Kind.REDUCE), *explicit.reduction(NBYTES))
    assert Roofline.of(machine).seconds(task) == pytest.approx(explicit.seconds(NBYTES))


def test_gpus_without_a_ring_of_direct_links_and_cpu_workers_form_one_ring_as_listed() -> None:
    ends = ("gpu0", "gpu1"), ("gpu1", "gpu2"), ("gpu0", "a"), ("gpu1", "a"), ("gpu2", "a")
    machine = box(*["gpu"] * 3, hosts="aaa", links=[link(*pair, 1e9) for pair in ends])
    assert rings_at_once(machine, machine.devices) == []
    ring = Ring.at_once(machine, machine.devices, ())
    assert len(ring.routes) == 3
    wires = [link(*ends, 1e9) for ends in ("ab", "bc", "ca")]
    cores = box("cpu", "cpu", "cpu", hosts="abc", links=wires)
    assert len(Ring.at_once(cores, cores.devices, ()).routes) == 3
