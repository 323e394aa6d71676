"""Whole commands, and ranks, on a simulated GPU: as on a real one, and labelled as what it is."""

import json

import pytest

from launched import output
from paceline.record.trace import read_trace
from paceline.records.machine_file import read_machine

NAME = "simulated on the host's memory"


@pytest.fixture
def one_gpu(monkeypatch) -> None:
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")


def test_encoded_sums_on_a_device_are_those_of_the_host(tmp_path):
    """Both threads have a stream of their own; a race between them or the caller's is an error."""
    rows = json.loads(output(tmp_path, 2, "simulated_sums.py"))
    for row in rows:
        assert row["differing"] == []
        assert row["void"] == [True] * 4  # with each of two codecs
        assert row["agreed"] == [1.0, 2.0]
        assert row["deadline"] == 60.0


def done(paceline, *arguments: str) -> dict:
    found = paceline(*arguments, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_a_run_learns_and_conforms_to_its_plan(one_gpu, paceline, tmp_path):
    how = ("--workers", "1", "--epochs", "2", "--profile-s", "0.2")
    result = done(paceline, "train", "lenet5", *how)
    assert result["machine"]["device"] == NAME
    assert result["faults"] == []
    assert result["accuracy"] > 0.85
    measured = read_trace(tmp_path / "runs" / result["id"] / "trace.json")["measured"]
    assert {resource.owner for resource in measured.tracks} == {"gpu0"}


def test_it_takes_the_same_steps_as_a_cpu(monkeypatch, paceline):
    how = ("train", "lenet5", "--workers", "1", "--epochs", "1", "--profile-s", "0.2")
    on_cpu = done(paceline, *how)
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")
    on_gpu = done(paceline, *how)
    assert [on_cpu["machine"]["device"], on_gpu["machine"]["device"]] == ["cpu", NAME]
    losses = [run["epochs"][0]["train_loss"] for run in (on_cpu, on_gpu)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_ranks_on_gpus_train_as_one_process_does(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "2")
    rows = json.loads(output(tmp_path, 2, "simulated_ranks.py"))
    assert [device for device, _ in rows] == ["simulated:0", "simulated:1"]
    assert max(error for _, error in rows) < 1e-12


def test_ranks_with_host_conform_to_their_plan(monkeypatch, paceline, tmp_path):
    """Copies to the host and back are on lanes of their own, and in the plan's order."""
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "2")
    how = ("--strategy", "host", "--workers", "2", "--epochs", "2", "--profile-s", "0.2")
    result = done(paceline, "train", "lenet5", *how)
    assert result["faults"] == []
    measured = read_trace(tmp_path / "runs" / result["id"] / "trace.json")["measured"]
    lanes = {(resource.owner, resource.lane.value) for resource in measured.tracks}
    assert {(f"gpu{rank}", lane) for rank in (0, 1) for lane in ("d2h", "h2d")} <= lanes


def test_bodies_on_a_gpu_and_their_hub_conform_to_their_plan(one_gpu, paceline):
    """Of two lanes, whose copies to their device come one after another."""
    how = ("--strategy", "wheel", "--workers", "2", "--epochs", "1", "--profile-s", "0.2")
    result = done(paceline, "train", "lenet5", *how)
    assert result["machine"]["device"] == f"cpu, {NAME}"
    assert result["faults"] == []
    assert result["lost"] == []


def test_a_profile_says_what_it_was_taken_on(one_gpu, paceline):
    result = done(paceline, "profile", "lenet5", "--steps", "4", "--workers", "1")
    assert result["machine"]["device"] == NAME


def test_a_probe_says_what_it_has_measured(one_gpu, paceline, tmp_path):
    done(paceline, "probe", "--seconds", "0.5", "--output", "simulated.toml")
    machine = read_machine(tmp_path / "simulated.toml")
    (device,), (link,) = machine.devices, machine.links
    assert (device.name, device.kind) == ("gpu0", "gpu")
    assert link.between[0] == "gpu0"
    assert all(NAME in one.source for one in (device, link))
    assert "memory: its part of the host's" in device.source


def test_a_rehearsal_stays_on_cores(one_gpu, paceline):
    how = ("--device", "p100", "--workers", "2", "--steps", "3", "--strategy", "allreduce")
    result = done(paceline, "rehearse", "lenet5", *how)
    assert result["machine"]["device"] == "cpu"
    assert result["faults"] == []


def test_ranks_of_torchrun_are_refused_too(one_gpu, start):
    ranks = ("--standalone", "--nproc-per-node=2", "-m", "paceline", "train", "lenet5")
    found = start("-m", "torch.distributed.run", *ranks).finish()
    assert found.code != 0
    lines = {line for line in found.err.splitlines() if line.startswith("paceline: ")}
    assert lines - {"paceline: terminated"} == {  # by torchrun, which ends a rank that is later
        "paceline: workers: 2 on a machine with one GPU, of which each takes one; take fewer, or "
        "hide the GPUs with CUDA_VISIBLE_DEVICES= to compute on CPU cores"
    }


@pytest.mark.parametrize("way", ["process_group", "joined", "initialised"])
def test_ranks_on_devices_of_different_kinds_are_told_so(tmp_path, way):
    told = sorted(map(json.loads, output(tmp_path, 2, "kinds.py", way).splitlines()))
    why = (
        "workers: rank 0 on cpu, rank 1 on simulated: torch has no collective between these; hide "
        "the GPUs with CUDA_VISIBLE_DEVICES= to train on all CPUs"
    )
    assert told == [[0, why], [1, why]]


def test_a_head_on_a_gpu_learns_alike_from_a_server_in_main_memory(monkeypatch, paceline):
    """With one worker nothing is left to chance; its copies are recorded as planned."""
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "2")
    how = ("train", "lenet5", "--strategy", "wheel", "--workers", "1", "--set", "lanes=1")
    on_device = done(paceline, *how, "--epochs", "2", "--profile-s", "0.2")
    lent = ("--set", "server_memory=host")
    in_memory = done(paceline, *how, *lent, "--epochs", "2", "--profile-s", "0.2")
    assert in_memory["faults"] == on_device["faults"] == []
    assert in_memory["machine"]["device"] == NAME
    losses = [
        [(epoch["train_loss"], epoch["test_loss"]) for epoch in run["epochs"]]
        for run in (on_device, in_memory)
    ]
    assert losses[0] == losses[1]
