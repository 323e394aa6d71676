"""Hosts with several network adapters: rings of GPUs take all of them, other messages one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, chain, link
from paceline.core.cluster import Cluster
from paceline.core.machine import Machine
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, rings
from paceline.records.catalogue import EqualDevices, by_name, known_link
from paceline.records.machine_file import read_machine
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan
from refusals import refused

NBYTES = 10e9


def cluster(rails: int, hosts: int = 2, network: str = "ib-hdr") -> Cluster:
    named = by_name(f"{hosts}x8xa100-40gb+{rails}x{network}")
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
    machine = cluster(rails, hosts).for_workers(ranks).reached
    # Every host sends 2 (n - 1) / n of the bytes to the next, and every GPU as many over NVLink.
    sent = 2 * (ranks - 1) / ranks * NBYTES
    # One adapter that reads the memory of GPUs is not slowed by their bus.
    rate = min(rails * reached("ib-hdr"), reached("nvlink3"))
    assert reached("ib-hdr") > reached("pcie4")
    assert ring_s(machine) == pytest.approx(sent / rate, rel=0.01)
    route = Ring.at_once(machine, machine.first_devices(ranks), ()).reduction(NBYTES)
    assert route.cost.nbytes <= sent  # on the busiest of the links, which one of the rails is


@pytest.mark.parametrize("network", ["ib-hdr", "25gbe"])
def test_a_host_that_stands_for_many_exchanges_as_all_that_are_listed(network: str) -> None:
    declared = cluster(4, 4, network)
    listed, standing = (declared.for_workers(32, symmetric).reached for symmetric in (False, True))
    assert len(standing.hosts) < len(listed.hosts)
    assert ring_s(standing) == pytest.approx(ring_s(listed))


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
        ("cpu", {"nbytes_per_s": 1e9}, 1e9),
        # Adapters of GPUs are beside their links with their hosts: past these.
        ("gpu", {"nbytes_per_s": 2e9, "rails": 4}, 8e9),
        ("gpu", {"nbytes_per_s": 8e9}, 3e9),  # without RDMA the bus of one GPU carries all
    ],
)
def test_a_listed_link_has_rails_too(kind: str, network: dict, nbytes_per_s: float) -> None:
    links = [link("gpu0", "a", 3e9), link("gpu1", "b", 3e9)] if kind == "gpu" else []
    machine = box(kind, kind, hosts="ab", links=[*links, link("a", "b", **network)])
    assert ring_s(machine) == pytest.approx(NBYTES / nbytes_per_s)


@pytest.mark.parametrize("rails", [2, 8])
def test_a_plan_of_allreduce_exchanges_over_them(rails: int) -> None:
    machine = cluster(rails).for_workers(16, symmetric=True)
    config = AllReduce(workers=16, bucket_mb=1000)
    task = plan(chain((1.0, 40_000_000)), machine, config, Window(1))["s0/reduce[0]"]
    assert task.cost.nbytes == pytest.approx(2 * 15 / 16 * 40_000_000 / rails)


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
    assert f"{name}: rails: " in caught.value.problem


def test_a_file_says_them_as_a_name_does_and_a_name_without_has_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    of_hosts = 'device = "a100-40gb"\ndevices = 8\nhosts = 2\nnetwork = "ib-hdr"\nrails = 4\n'
    path.write_text(f'name = "mine"\n[equal]\n{of_hosts}')
    equal = EqualDevices(device="a100-40gb", devices=8, hosts=2, network="ib-hdr", rails=4)
    assert read_machine(path) == equal.machine("mine")
    assert read_machine(path).for_workers(16).links == cluster(4).for_workers(16).links
    assert by_name("2x8xa100-40gb+ib-hdr").levels == cluster(1).levels
