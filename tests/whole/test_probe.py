"""`paceline probe` with real workers: what it writes, and that it leaves nothing else behind."""

import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.core.cost import Roofline
from paceline.core.machine import Machine
from paceline.core.simulate import simulate
from paceline.core.strategy import Window
from paceline.core.workload import Cost, Layer, Parameter, Workload
from paceline.records.machine_file import read_machine
from paceline.strategies import EXCHANGES
from processes import DEADLINE_S, Finished, Started

pytestmark = pytest.mark.slow

QUICK = ("--seconds", "0.2")
RANK = "paceline.studies.probe.probe_ranks"


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> tuple[Finished, Path]:
    """A probe of two workers, for all tests that look at what it wrote."""
    home = tmp_path_factory.mktemp("probe")
    command = [sys.executable, "-m", "paceline", "probe", "--workers", "2", *QUICK, "--json"]
    started = Started(command, home)
    try:
        done = started.finish()
        assert done.code == 0, done.err
        assert not started.members()
    finally:
        started.kill()
    return done, home


@pytest.fixture
def machine(probed) -> Machine:
    (path,) = probed[1].iterdir()
    return read_machine(path)


def test_one_file_named_after_this_computer_says_what_is_printed(probed, machine):
    done, home = probed
    said = json.loads(done.out)
    assert [path.name for path in home.iterdir()] == [said["file"]]
    assert Path(said["file"]).stem == machine.name
    assert machine.name == platform.node().partition(".")[0] or "." in machine.name
    assert Machine.model_validate(said["machine"]) == machine
    first, *more = done.err.splitlines()
    assert first == "measuring 2 x cpu, for about 0.2 s"
    assert all("this machine is busy with other programs" in line for line in more)


def test_the_machine_is_this_one(machine):
    (host,) = machine.hosts
    assert host.cores == len(os.sched_getaffinity(0))
    assert host.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert [device.name for device in machine.devices] == ["cpu0", "cpu1"]
    assert sum(device.memory_bytes for device in machine.devices) <= host.memory_bytes
    (link,) = machine.links
    assert link.between == (host.name, host.name)
    assert link.uses_cores


def test_values_are_plausible(machine):
    """Bounds that hold on any computer, however busy: units are right, and nothing is missing."""
    (host,), (link,) = machine.hosts, machine.links
    assert 1e8 < host.memory_bandwidth_bytes_per_s < 2e12
    assert 0 < host.reduce_latency_s < 1
    assert 1e6 < link.bandwidth_bytes_per_s < host.memory_bandwidth_bytes_per_s
    assert 0 <= link.latency_s < 1
    for device in machine.devices:
        assert 1e8 < device.flops_per_s < 1e14
        assert 1e7 < device.memory_bandwidth_bytes_per_s < 2e12
        assert 1e-8 < device.call_latency_s < 1e-2
        assert set(device.codecs) == {"eightbit", "fourbit", "cast", "onebit", "threshold"}
        for speed in device.codecs.values():
            assert 1e5 < speed.encode_values_per_s < 1e12
            assert 1e5 < speed.decode_values_per_s < 1e12
            assert 0 <= speed.latency_s < 1
        # One bit is made by dozens of torch's operations, eight by one kernel.
        assert (
            device.codecs["eightbit"].decode_values_per_s
            > device.codecs["onebit"].decode_values_per_s
        )


def test_every_source_says_how_and_when_and_with_what_spread(machine):
    for fact in (*machine.hosts, *machine.devices, *machine.links):
        assert fact.source.startswith("measured by paceline probe ")
        assert f"torch {torch.__version__}" in fact.source
        assert time.strftime("%Y-") in fact.source
        assert "quartiles of " in fact.source


@pytest.mark.parametrize("strategy", EXCHANGES.values(), ids=list(EXCHANGES))
def test_every_strategy_can_be_planned_on_it(machine, strategy):
    layer = Layer("fc", (Parameter("w", (100_000,)),), 0, Cost(1e9, 1e6, 1), Cost(2e9, 2e6, 1))
    workload = Workload("one", 1, (layer,), (0,), 0)
    tasks = strategy.plan(workload, machine, strategy.config(workers=2), Window(2))
    assert simulate(tasks, Roofline.of(machine)).makespan_s > 0


def test_one_worker_has_nobody_to_measure_links_with(paceline, tmp_path):
    (tmp_path / "mine.toml").write_text("precious")
    options = ("--workers", "1", *QUICK, "--output", "mine.toml", "--force")
    done = paceline("probe", *options)
    assert done.code == 0, done.err
    machine = read_machine(tmp_path / "mine.toml")
    assert (machine.name, len(machine.devices), machine.links) == ("mine", 1, ())
    assert "alone" in machine.devices[0].source
    assert done.out.splitlines()[-1] == "written mine.toml"


def test_ranks_of_torchrun_are_probed(start, tmp_path):
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    probe = ("-m", "paceline", "probe", *QUICK, "--output", "two.toml")
    done = start(*module, *probe).finish()
    assert done.code == 0, done.err
    assert len(read_machine(tmp_path / "two.toml").devices) == 2
    again = start(*module, *probe).finish()
    assert again.code != 0
    assert again.err.count("paceline: output: two.toml is there already") == 1


def ranks_of(started: Started) -> list[int]:
    return sorted(pid for pid, command in started.members().items() if RANK in command)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_worker_is_named_and_nothing_is_written(start, tmp_path):
    started = start("-m", "paceline", "probe", "--workers", "2", "--seconds", "60")
    until(lambda: len(ranks_of(started)) == 2)
    time.sleep(1)
    victim = ranks_of(started)[1]
    os.kill(victim, signal.SIGKILL)
    done = started.finish()
    assert done.code == 1
    assert f"(process {victim})" in done.err
    assert list(tmp_path.iterdir()) == []


def test_nothing_outlives_a_killed_probe(start, tmp_path):
    started = start("-m", "paceline", "probe", "--workers", "2", "--seconds", "60")
    until(lambda: len(ranks_of(started)) == 2)
    started.process.kill()
    started.process.wait()
    until(lambda: not started.members())
    assert list(tmp_path.iterdir()) == []
