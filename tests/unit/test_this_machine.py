"""This machine, as a profile and `paceline doctor` describe it."""

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from groups import group_of
from paceline.core.calibration import Measurement
from paceline.core.cost import Roofline, compute_lane
from paceline.core.machine import Machine
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.links.group import Group
from paceline.measure.this_machine import Speed, facts, this_machine
from paceline.strategies import EXCHANGES
from paceline.studies.doctor.this_machine import examine


def ranks(number: int, kind: str, boot_ids: str = "a") -> Group:
    return group_of(0, number, "cuda:0" if kind == "gpu" else "cpu", boot_ids)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_rank_is_a_device_of_its_own_speed(kind: str):
    speeds = [Speed(3e9, 5e9), Speed(2e9, 4e9)]
    machine = this_machine(ranks(2, kind), speeds)
    assert [device.name for device in machine.devices] == [f"{kind}0", f"{kind}1"]
    assert {device.kind for device in machine.devices} == {kind}
    assert [device.flops_per_s for device in machine.devices] == [3e9, 2e9]
    assert [device.memory_bandwidth_bytes_per_s for device in machine.devices] == [5e9, 4e9]
    assert machine.links == ()
    assert Machine.model_validate(machine.model_dump()) == machine


def test_the_layers_of_a_profiled_model_take_as_long_as_they_took():
    # One bound by arithmetic and one by memory: priced at their whole over the time, they take 2 s.
    conv = Layer("conv", (), 0, Cost(4e9, 1e6), Cost(8e9, 2e6))
    fc = Layer("fc", (), 0, Cost(1e6, 2e9), Cost(2e6, 6e9))
    workload = Workload("two", 1, (conv, fc), (1, 0), 0)
    machine = this_machine(ranks(1, "cpu"), [Speed.of(workload, 1.5)])
    rate = Roofline.of(machine).rates[compute_lane("cpu0")]
    parts = [conv.forward, conv.backward, fc.forward, fc.backward]
    assert sum(map(rate.work_s, parts)) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("boot_ids", "hosts"),
    [
        ("aaaa", ["this-host"] * 4),
        ("aabb", ["host0", "host0", "host1", "host1"]),
        ("abac", ["host0", "host1", "host0", "host2"]),
    ],
)
def test_ranks_of_one_kernel_are_on_one_host(boot_ids: str, hosts: list[str]):
    machine = this_machine(ranks(4, "cpu", boot_ids), [Speed(1e9, 1e9)] * 4)
    assert [device.host for device in machine.devices] == hosts
    assert [host.name for host in machine.hosts] == sorted(set(hosts))


def test_ranks_in_containers_of_their_own_share_no_host():
    group = ranks(2, "cpu")
    one, other = group.members
    apart = replace(group, members=(one, other._replace(pid_namespace="other")))
    machine = this_machine(apart, [Speed(1e9, 1e9)] * 2)
    assert [device.host for device in machine.devices] == ["host0", "host1"]


@pytest.mark.parametrize("strategy", EXCHANGES.values(), ids=list(EXCHANGES))
@pytest.mark.parametrize("boot_ids", ["a", "ab"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_every_strategy_can_be_planned_on_it_once_calibrated(strategy, boot_ids, kind):
    bare = this_machine(ranks(3, kind, boot_ids), [Speed(1e9, 1e9)] * 3)
    measured = Measurement(1024, 1e-4), Measurement(2**22, 5e-3)
    machine = strategy.calibrate(bare, measured)
    layer = Layer("fc", (Parameter("w", (1000,)),), 0, Cost(1e6), Cost(2e6))
    workload = Workload("one", 1, (layer,), (0,), 0)
    tasks = strategy.plan(workload, machine, strategy.config(workers=3), Window(2))
    assert simulate(tasks, Roofline.of(machine)).makespan_s > 1e-4


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


def test_the_machine_is_described_as_the_system_describes_it():
    found = examine()
    assert found.versions["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert found.versions[platform.system()] == platform.release()
    assert found.cores == len(os.sched_getaffinity(0))
    assert 0 < found.physical_cores <= found.cores <= found.all_cores
    assert 0 < found.free_nbytes < found.memory_nbytes
    assert found.threads == torch.get_num_threads()
    assert "lo" not in [one.name for one in found.networks]
    assert found.built["Paceline"].startswith(("GCC", "clang"))


def test_the_page_and_its_json_say_the_same(line):
    line("doctor")
    assert line.code == 0
    assert line.out.startswith("## paceline doctor\n")
    found = line("doctor", "--json").found
    assert found["versions"]["torch"] == torch.__version__
    assert {"code", "what", "why", "instead"} == set().union(*found["slow"]) or not found["slow"]
