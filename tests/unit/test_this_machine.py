"""Description of this machine, from a profile and in a result's facts."""

import json
import os
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from absent_ranks import group_of
from paceline.core.cost import Rate, Roofline, compute_lane
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Workload
from paceline.links.group import Group
from paceline.measure.this_machine import facts, speed_of, this_machine

MEMINFO = Path("/proc/meminfo")  # its first line: MemTotal: ... kB


def ranks(number: int, kind: str, boot_ids: str = "a") -> Group:
    return group_of(0, number, "cuda:0" if kind == "gpu" else "cpu", boot_ids)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_rank_is_a_device_of_its_own_speed(kind: str):
    machine = this_machine(ranks(2, kind), [Rate(3e9, 5e9), Rate(2e9, 4e9)])
    facts_of = attrgetter("name", "kind", "flops_per_s", "memory_bandwidth_bytes_per_s")
    expected = [(f"{kind}0", kind, 3e9, 5e9), (f"{kind}1", kind, 2e9, 4e9)]
    assert list(map(facts_of, machine.devices)) == expected
    assert Machine.model_validate(machine.model_dump()) == machine


def test_the_layers_of_a_profiled_model_take_the_measured_time():
    # One layer is limited by arithmetic, one by memory: at average rates, they would take 3 s.
    conv = Layer("conv", (), 0, Cost(4e9, 1e6), Cost(8e9, 2e6))
    fc = Layer("fc", (), 0, Cost(1e6, 2e9), Cost(2e6, 6e9))
    workload = Workload("two", 1, (conv, fc), (1, 0), 0)
    machine = this_machine(ranks(1, "cpu"), [speed_of(workload, 1.5)])
    rate = Roofline.of(machine).rates[compute_lane("cpu0")]
    parts = [conv.forward, conv.backward, fc.forward, fc.backward]
    assert sum(map(rate.work_s, parts)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("boot_ids", "hosts"),
    [
        ("aaaa", ["this-host"] * 4),
        ("abac", ["host0", "host1", "host0", "host2"]),
    ],
)
def test_ranks_of_one_kernel_are_on_one_host(boot_ids: str, hosts: list[str]):
    machine = this_machine(ranks(4, "cpu", boot_ids), [Rate(1e9, 1e9)] * 4)
    assert [device.host for device in machine.devices] == hosts
    assert [host.name for host in machine.hosts] == sorted(set(hosts))


def test_ranks_in_different_containers_share_no_host():
    group = ranks(2, "cpu")
    one, other = group.members
    apart = replace(group, members=(one, other._replace(pid_namespace="other")))
    machine = this_machine(apart, [Rate(1e9, 1e9)] * 2)
    assert [device.host for device in machine.devices] == ["host0", "host1"]


def test_facts_are_those_of_the_system():
    known = facts(torch.device("cpu"))
    assert json.loads(json.dumps(known)) == known
    expected = {"cores": len(os.sched_getaffinity(0)), "device": "cpu", "torch": torch.__version__}
    expected["memory_bytes"] = int(MEMINFO.read_text().split()[1]) * 1024
    assert known.items() >= expected.items()
    assert known["processor"]
