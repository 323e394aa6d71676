"""`paceline probe` with real workers: its machine file, and no other files or processes."""

import os
import platform
import signal
from pathlib import Path

import pytest
import torch

from faults import Pause, failpoints
from paceline.core.machine import Machine
from paceline.records.machine_file import read_machine

QUICK = ("--seconds", "0.2")


def test_the_file_of_two_workers_describes_this_machine(outcome, tmp_path) -> None:
    said = outcome("probe", "--workers", "2", *QUICK)
    (path,) = tmp_path.iterdir()
    machine = read_machine(path)
    assert (path.name, path.stem) == (said["file"], machine.name)
    assert machine.name == platform.node().partition(".")[0] or "." in machine.name
    assert Machine.model_validate(said["machine"]) == machine
    (host,), (link,) = machine.hosts, machine.links
    assert host.cores == len(os.sched_getaffinity(0))
    assert host.memory_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert [device.name for device in machine.devices] == ["cpu0", "cpu1"]
    assert sum(device.memory_bytes for device in machine.devices) <= host.memory_bytes
    assert link.between == (host.name, host.name)
    assert link.uses_cores
    for fact in (host, link, *machine.devices):
        assert f"torch {torch.__version__}" in fact.source
    # These bounds hold on any computer, however busy, and exclude wrong units.
    assert 1e7 < host.memory_bandwidth_bytes_per_s < 2e12
    assert 0 < host.reduce_latency_s < 1
    assert 1e5 < link.bandwidth_bytes_per_s < 2e12
    assert 0 <= link.latency_s < 1
    for device in machine.devices:
        assert 1e7 < device.flops_per_s < 1e14
        assert 1e6 < device.memory_bandwidth_bytes_per_s < 2e12
        assert 1e-8 < device.call_latency_s < 1
        assert set(device.codecs) == {"eightbit", "fourbit", "cast", "onebit", "threshold"}
        for speed in device.codecs.values():
            assert 1e4 < speed.encode_values_per_s < 1e12
            assert 1e4 < speed.decode_values_per_s < 1e12
            assert 0 <= speed.latency_s < 1


@pytest.mark.slow
def test_one_worker_measures_no_links(paceline, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("precious")
    done = paceline("probe", "--workers", "1", *QUICK, "--output", "mine.toml", "--force")
    assert done.code == 0, done.err
    machine = read_machine(tmp_path / "mine.toml")
    assert (machine.name, len(machine.devices), machine.links) == ("mine", 1, ())


@pytest.mark.slow
def test_a_probe_with_a_killed_worker_leaves_no_files_or_processes(start, tmp_path: Path) -> None:
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at("rank.met", worker=1)):
        started = start("-m", "paceline", "probe", "--workers", "2", "--seconds", "60")
    worker = pause.reached()
    os.kill(worker, signal.SIGKILL)
    done = started.finish()
    assert done.code == 1
    assert f"(process {worker})" in done.err
    assert not started.members()
    assert [path.name for path in tmp_path.iterdir()] == ["pause"]
