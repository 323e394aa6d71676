import json
import os
import platform
from pathlib import Path

import pytest
import torch

from groups import group_of
from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.links.group import Group
from paceline.strategies.allreduce.config import AllReduce
from paceline.strategies.allreduce.plan import plan
from paceline.training.this_machine import Reduction, Speed, facts, this_machine

LATENCY_S, NBYTES_PER_S = 2e-4, 1.7e9
SMALL, LARGE = 1024, 2**22


def ranks(number: int, kind: str, boot_ids: str = "a") -> Group:
    return group_of(0, number, "cuda" if kind == "gpu" else "cpu", boot_ids)


def known_machine(number: int, kind: str) -> Machine:
    """CPUs that share the link of their host, or GPUs in a ring."""
    fact = {"memory_bytes": 1e9, "memory_bandwidth_bytes_per_s": 1e9, "source": "made up"}
    devices = [
        fact | {"name": f"{kind}{i}", "host": "h", "kind": kind, "flops_per_s": 1e9}
        for i in range(number)
    ]
    ends = [["h", "h"]]
    if kind == "gpu":
        ends = [[f"gpu{i}", f"gpu{(i + 1) % number}"] for i in range(number)][: number * 2 - 3]
    links = [
        {
            "between": between,
            "bandwidth_bytes_per_s": NBYTES_PER_S,
            "latency_s": LATENCY_S,
            "source": "made up",
        }
        for between in ends
    ]
    hosts = [fact | {"name": "h", "cores": 8}]
    return Machine.model_validate(
        {"name": "known", "hosts": hosts, "devices": devices, "links": links}
    )


def exchange_s(machine: Machine, nbytes: int) -> float:
    """What an all-reduce of one bucket costs by the plan."""
    layer = Layer("fc", (Parameter("w", (nbytes // 4,)),), 0, Cost(), Cost())
    workload = Workload("one", 1, (layer,), (0,), 0)
    tasks = plan(workload, machine, AllReduce(workers=len(machine.devices)), Window(1))
    return Roofline.of(machine).seconds(tasks["s0/reduce[0]"])


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("number", [2, 3, 8])
def test_links_are_those_under_which_the_exchanges_take_what_was_measured(number, kind):
    known = known_machine(number, kind)
    measured = [Reduction(nbytes, exchange_s(known, nbytes)) for nbytes in (SMALL, LARGE)]
    found = this_machine(ranks(number, kind), [Speed(1e9, 1e9)] * number, measured)
    assert len(found.links) == len(known.links)
    for link in found.links:
        assert link.bandwidth_bytes_per_s == pytest.approx(NBYTES_PER_S, rel=1e-9)
        assert link.latency_s == pytest.approx(LATENCY_S, rel=1e-9)
    for nbytes in (SMALL, 100_000, LARGE, 20 * LARGE):
        assert exchange_s(found, nbytes) == pytest.approx(exchange_s(known, nbytes), rel=1e-9)


def test_the_closed_form_of_a_ring_on_one_host():
    # Four ranks: six messages in turn, and all four send 6/4 of the bytes through one link.
    known = known_machine(4, "cpu")
    assert exchange_s(known, LARGE) == pytest.approx(6 * LATENCY_S + 6 * LARGE / NBYTES_PER_S)


@pytest.mark.parametrize("large_s", [1e-3, 0.5e-3, 1e-9])
def test_noise_that_makes_the_large_exchange_the_faster_gives_a_link_nevertheless(large_s):
    measured = [Reduction(SMALL, 1e-3), Reduction(LARGE, large_s)]
    (link,) = this_machine(ranks(2, "cpu"), [Speed(1e9, 1e9)] * 2, measured).links
    assert link.bandwidth_bytes_per_s > 0
    assert link.latency_s >= 0


def test_only_cpus_of_one_machine_carry_their_messages_themselves():
    measured = [Reduction(SMALL, 1e-3), Reduction(LARGE, 2e-3)]

    def carries(group: Group) -> bool:
        (link,) = this_machine(group, [Speed(1e9, 1e9)] * 2, measured).links
        return link.uses_cores

    assert carries(ranks(2, "cpu"))
    assert not carries(ranks(2, "cpu", boot_ids="ab"))
    assert not carries(ranks(2, "gpu"))


def test_every_rank_is_a_device_of_its_own_speed():
    speeds = [Speed(3e9, 5e9), Speed(2e9, 4e9)]
    measured = [Reduction(SMALL, 1e-3), Reduction(LARGE, 2e-3)]
    machine = this_machine(ranks(2, "cpu"), speeds, measured)
    assert [device.name for device in machine.devices] == ["cpu0", "cpu1"]
    assert [device.flops_per_s for device in machine.devices] == [3e9, 2e9]
    assert [device.memory_bandwidth_bytes_per_s for device in machine.devices] == [5e9, 4e9]
    assert this_machine(ranks(1, "cpu"), speeds[:1], []).links == ()


def test_facts_are_those_of_the_system():
    known = facts(torch.device("cpu"))
    assert json.loads(json.dumps(known)) == known
    assert known["cores"] == os.cpu_count()
    assert known["device"] == "cpu"
    assert known["torch"] == torch.__version__
    assert known["python"] == platform.python_version()
    (total,) = (
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert known["memory_bytes"] == total
    assert known["processor"]
