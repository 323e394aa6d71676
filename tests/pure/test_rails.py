"""Hosts with several network adapters: rings of GPUs take all of them, other messages one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boxes import box, link
from paceline.core.cluster import Cluster
from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, rings
from paceline.recipes.named import workload_of
from paceline.records.catalogue import EqualDevices, by_name, known_link
from paceline.records.machine_file import read_machine
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan

NBYTES = 10e9


def cluster(rails: int, hosts: int = 2, network: str = "ib-hdr") -> Cluster:
    named = by_name(f"{hosts}x8xa100-40gb+{rails}x{network}")
    assert isinstance(named, Cluster)
    return named


def ring(machine: Machine) -> Ring:
    return Ring.at_once(machine, machine.first_devices(machine.num_devices), ())


def reached(name: str) -> float:
    known = known_link(name)
    return known.share * known.bandwidth_bytes_per_s


@given(hosts=st.integers(2, 4), rails=st.integers(2, 16))
def test_rings_take_all_rails_or_what_joins_the_gpus_of_a_host(hosts: int, rails: int) -> None:
    ranks = 8 * hosts
    whole = ring(cluster(rails, hosts).for_workers(ranks).reached)
    # Every host sends 2 (n - 1) / n of the bytes to the next, and every GPU as many over NVLink.
    sent = 2 * (ranks - 1) / ranks * NBYTES
    rate = min(rails * reached("ib-hdr"), reached("nvlink3"))
    assert whole.seconds(NBYTES) == pytest.approx(sent / rate, rel=0.01)
    route = whole.reduction(NBYTES)
    assert route.cost.nbytes <= sent  # on the busiest of the links, which one of the rails is


def test_a_name_without_rails_has_one() -> None:
    assert by_name("2x8xa100-40gb+ib-hdr").levels == cluster(1).levels


@pytest.mark.parametrize("network", ["ib-hdr", "25gbe"])
def test_a_host_that_stands_for_many_exchanges_as_all_that_are_listed(network: str) -> None:
    declared = cluster(4, 4, network)
    listed, standing = (declared.for_workers(32, symmetric).reached for symmetric in (False, True))
    assert len(standing.hosts) < len(listed.hosts)
    assert ring(standing).seconds(NBYTES) == pytest.approx(ring(listed).seconds(NBYTES))


def test_messages_and_exchanges_of_hosts_take_one_adapter() -> None:
    one, many = (cluster(rails, 4).for_workers(32).reached for rails in (1, 8))
    for ours in (one, many):
        assert rings(ours, ours.hosts, ours.devices)[0].seconds(NBYTES) == pytest.approx(
            2 * 3 / 4 * NBYTES / reached("ib-hdr"), rel=0.01
        )
    assert Ring.over(one, one.devices, ()).seconds(NBYTES) == pytest.approx(
        Ring.over(many, many.devices, ()).seconds(NBYTES)
    )


def test_rings_of_cores_take_one_adapter() -> None:
    def seconds(rails: int) -> float:
        machine = box("cpu", "cpu", hosts="ab", links=[link("a", "b", 1e9, rails=rails)])
        return Ring.at_once(machine, machine.devices, ()).seconds(NBYTES)

    assert seconds(4) == seconds(1) == pytest.approx(NBYTES / 1e9)


def test_a_listed_link_has_rails_too() -> None:
    links = [link("gpu0", "a", 3e9), link("gpu1", "b", 3e9), link("a", "b", 2e9, rails=4)]
    machine = box("gpu", "gpu", hosts="ab", links=links)
    # Past the GPUs' links with their hosts: adapters are beside them.
    assert ring(machine).seconds(NBYTES) == pytest.approx(NBYTES / 8e9)


def test_one_adapter_that_reads_the_memory_of_gpus_is_not_slowed_by_their_bus() -> None:
    assert reached("ib-hdr") > reached("pcie4")
    whole = ring(cluster(1).for_workers(16).reached)
    sent = 2 * 15 / 16 * NBYTES
    assert whole.seconds(NBYTES) == pytest.approx(sent / reached("ib-hdr"), rel=0.01)


def test_without_rdma_the_bus_of_one_gpu_carries_all() -> None:
    links = [link("gpu0", "a", 3e9), link("gpu1", "b", 3e9), link("a", "b", 8e9)]
    machine = box("gpu", "gpu", hosts="ab", links=links)
    assert ring(machine).seconds(NBYTES) == pytest.approx(NBYTES / 3e9)


def test_a_plan_of_allreduce_exchanges_over_them() -> None:
    work = workload_of("resnet50", 32)
    nbytes = sum(layer.gradient_nbytes for layer in work.layers)
    sent = {}
    for rails in (2, 8):
        machine = cluster(rails).for_workers(16, symmetric=True)
        made = plan(work, machine, AllReduce(workers=16, bucket_mb=1000), Window(1))
        (task,) = (task for task in made.tasks if task.kind == "reduce")
        sent[rails] = task.cost.nbytes
    assert sent[2] == pytest.approx(2 * 15 / 16 * nbytes / 2)
    assert sent[8] == pytest.approx(2 * 15 / 16 * nbytes / 8)


@pytest.mark.parametrize(
    ("links", "what"),
    [
        ([link("gpu0", "gpu1", 1e9, rails=2)], "gpu0--gpu1.rails"),
        ([link("gpu0", "h", 1e9, rails=2), link("gpu1", "h", 1e9)], "gpu0--h.rails"),
        ([link("gpu0", "h", 1e9), link("h", "h", 1e9, rails=2)], "h--h.rails"),
        ([link("gpu0", "h", 1e9, rdma=True), link("gpu1", "h", 1e9)], "gpu0--h.rdma"),
    ],
)
def test_links_within_a_host_have_none(links: list[dict], what: str) -> None:
    with pytest.raises(ValueError, match=f"links.{what}: network adapters join a host with"):
        box("gpu", "gpu", links=links)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("8xv100+2x25gbe", "rails: a single host has no network between hosts"),
        ("2x8xv100+0x25gbe", "rails: .* greater than or equal to 1"),
        ("2x8xv100+65x25gbe", "rails: .* less than or equal to 64"),
    ],
)
def test_rails_that_mean_nothing_are_refused(name: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        by_name(name)


def test_a_file_says_them_as_a_name_does(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    of_hosts = 'device = "a100-40gb"\ndevices = 8\nhosts = 2\nnetwork = "ib-hdr"\nrails = 4\n'
    path.write_text(f'name = "mine"\n[equal]\n{of_hosts}')
    equal = EqualDevices(device="a100-40gb", devices=8, hosts=2, network="ib-hdr", rails=4)
    assert read_machine(path) == equal.machine("mine")
    assert read_machine(path).for_workers(16).links == cluster(4).for_workers(16).links
