"""Uneven workers as real processes: every sample once an epoch, whoever dies, joins or fails."""

import json
import os
import signal
import time
from pathlib import Path
from typing import get_args

import pytest

from launched import PROGRAMS
from paceline.strategies.hogbatch.config import PolicyName

UNEVEN = str(PROGRAMS / "uneven.py")
LONG = ("--profile-s", "0.1", "--epochs", "1000")
TRAIN = ("-m", "paceline", "train", "mlp-64-32-10", "--strategy", "hogbatch")


def ran(start, *arguments: object) -> dict:
    shared_memory = set(Path("/dev/shm").iterdir())
    done = start(UNEVEN, *map(str, arguments)).finish()
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    return json.loads(done.out)


@pytest.mark.parametrize("policy", ["hogwild", "adaptive"])
def test_every_sample_is_used_once_an_epoch(start, policy: str):
    found = ran(start, "all", policy, "cpu:1,cpu:2@slow=3", 3)
    assert found["uses"] == [3.0] * 600
    assert found["samples"] == 1800
    assert (found["lost"], found["faults"]) == ([], [])
    assert found["workers"] == [0, 1]


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_a_killed_worker_gives_its_samples_to_the_others(start, policy: str):
    found = ran(start, "kill", policy, "cpu:1,cpu:1,cpu:1", 3)
    assert found["uses"] == [3.0] * 600
    assert len(found["lost"]) == 1
    assert "was ended by SIGKILL" in found["lost"][0]
    assert len(found["peaks"]) == 2


def test_a_worker_that_does_not_answer_is_given_up(start):
    found = ran(start, "stop", "adaptive", "cpu:1,cpu:1", 2)
    assert found["uses"] == [2.0] * 600
    assert len(found["lost"]) == 1
    assert found["lost"][0].endswith("did not answer within 5 s")


def test_the_last_worker_ends_the_run(start):
    found = ran(start, "kill", "adaptive", "cpu:1", 2)
    assert found["error"].startswith("WorkerLost: worker 0 (cpu:1, process ")
    assert found["error"].endswith("was ended by SIGKILL: no worker is left")


def test_a_worker_joins_late(start):
    found = ran(start, "join", "adaptive", "cpu:1,cpu:1@slow=2", 100_000)
    assert found["workers"] == [0, 1, 2]
    assert found["uses"] == [float(found["epochs"])] * 600
    assert found["lost"] == []


def test_the_worker_whose_loss_is_no_number_is_named(start, tmp_path: Path):
    found = ran(start, "nan", "adaptive", "cpu:1,cpu:1", 2)
    (taken,) = tmp_path.glob("nan.*")
    pid = taken.suffix.removeprefix(".")
    assert found["error"].startswith("InvalidInput: learning_rate: the loss of worker ")
    assert f"process {pid}) became nan in epoch 1" in found["error"]


def test_a_label_out_of_range_is_named(start):
    found = ran(start, "label", "adaptive", "cpu:1", 1)
    assert found["error"] == (
        "InvalidInput: numbers: training sample 7 has label 2; labels of 2 classes are 0 to 1"
    )


def test_a_batch_larger_than_the_data_is_refused(start, monkeypatch):
    monkeypatch.setenv("BATCH_SIZE", "601")
    found = ran(start, "all", "hogbatch", "cpu:1", 1)
    assert found["error"].startswith(
        "InvalidInput: batch_size: policy hogbatch gives worker 0 (cpu:1) batches of up to 601 "
    )


def test_a_run_from_the_command_line(paceline, tmp_path: Path):
    workers = ("--policy", "adaptive", "--workers", "cpu:1,cpu:1@slow=4", "--profile-s", "0.2")
    done = paceline(*TRAIN[2:], *workers, "--learning-rate", "0.1", "--epochs", "4", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert set(result["updates"]) == set(result["utilisation"]) == {"cpu0", "cpu1"}
    assert min(result["updates"].values()) > 0
    assert all(0 < share <= 1 for share in result["utilisation"].values())
    assert result["accuracy"] > 0.85
    assert result["samples_per_s"] > 0
    assert (result["faults"], result["lost"]) == ([], [])
    assert sum(row["samples"] for row in result["workers"]) == 4 * 1438
    (folder,) = (tmp_path / "runs").iterdir()
    page = (folder / "report.html").read_text()
    for title in ("Loss against time", "Updates", "Batch size", "Staleness", "Utilisation"):
        assert f"<h2>{title}</h2>" in page
    again = paceline("report", str(folder))
    assert again.code == 0, again.err
    assert (folder / "model.safetensors").stat().st_size > 4 * 64 * 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "gpu:0"], "workers: gpu:0: this machine has 0 GPUs"),
        (["--learning-rate", "1e38"], "learning_rate: the loss of worker "),
    ],
)
def test_what_a_worker_finds_wrong_is_one_line(paceline, arguments: list[str], message: str):
    done = paceline(*TRAIN[2:], "--profile-s", "0.1", *arguments)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert message in line
    assert "Traceback" not in done.err
    assert done.out == ""


def training(start):
    """Start a run that would take minutes, and return it once it trains, and its workers."""
    run = start(*TRAIN, "--workers", "cpu:1,cpu:1", *LONG)
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 1/") for line in lines)
    workers = [pid for pid, command in run.members().items() if "hogbatch.worker" in command]
    assert len(workers) == 2
    return run, workers


def test_a_killed_coordinator_takes_its_workers_with_it(start):
    run, _ = training(start)
    run.process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while run.members():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupted_run_says_so_in_one_line(start):
    run, _ = training(start)
    os.killpg(run.process.pid, signal.SIGINT)
    done = run.finish(20)
    assert done.code == 130
    assert "Traceback" not in done.err
    assert not run.members()


def test_a_worker_killed_from_outside_is_named_and_missed_by_nobody(start):
    run, workers = training(start)
    os.kill(workers[0], signal.SIGKILL)
    lines = iter(run.process.stderr.readline, "")
    said = next(line for line in lines if "the others go on" in line)
    assert f"process {workers[0]}) was ended by SIGKILL" in said
    assert any(line.startswith("epoch ") for line in lines)
    os.kill(workers[1], signal.SIGKILL)
    done = run.finish(20)
    assert done.code == 1
    assert "no worker is left" in done.err.splitlines()[-1]
