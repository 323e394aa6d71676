"""Uneven workers as real processes: every sample once an epoch, whoever dies, joins or fails."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

from launched import PROGRAMS
from paceline.strategies.hogbatch.config import PolicyName
from processes import Started

pytestmark = pytest.mark.slow

UNEVEN = str(PROGRAMS / "uneven.py")
LONG = ("--profile-s", "0.1", "--epochs", "1000")
TRAIN = ("-m", "paceline", "train", "mlp-64-32-10", "--strategy", "hogbatch")
KILLS = {policy: f"kill/{policy}/cpu:1,cpu:1/3" for policy in get_args(PolicyName)}
KILLS["adaptive"] = "kill/adaptive/cpu:1,cpu:1,cpu:1/3"
STOP = "stop/adaptive/cpu:1,cpu:1/2"
JOIN = "join/adaptive/cpu:2@slow=3/100000"
NAN = "nan/adaptive/cpu:1,cpu:1/2"
LABEL = "label/adaptive/cpu:1/1"
LARGE = "large/hogbatch/cpu:1/1"
ON_GPU = "gpu/cpu_gpu/gpu:0/3"
BESIDE_GPU = {kind: f"{kind}/cpu_gpu/cpu:1,gpu:0/3" for kind in ("kill", "stop", "nan")}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What came of each run; one process coordinates them one after another."""
    asked = [*KILLS.values(), STOP, JOIN, NAN, LABEL, LARGE, ON_GPU, *BESIDE_GPU.values()]
    program = Started([sys.executable, UNEVEN, *asked], tmp_path_factory.mktemp("uneven"))
    try:
        done = program.finish(300)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert not program.members()
    finally:
        program.kill()
    runs = dict(map(json.loads, done.out.splitlines()))
    assert {one["left"] for one in runs.values()} == {0}
    return runs


@pytest.mark.parametrize("policy", KILLS)
def test_a_killed_worker_gives_its_samples_to_the_others(found, policy: str):
    run = found[KILLS[policy]]
    assert run["uses"] == [3.0] * 600
    assert len(run["lost"]) == 1
    assert "was ended by SIGKILL" in run["lost"][0]
    assert run["num_peaks"] == KILLS[policy].count("cpu:") - 1


def test_a_worker_that_does_not_answer_is_given_up(found):
    run = found[STOP]
    assert run["uses"] == [2.0] * 600
    assert len(run["lost"]) == 1
    assert run["lost"][0].endswith("did not answer within 3 s")


def test_a_worker_joins_late_and_every_sample_is_used_once_an_epoch(found):
    run = found[JOIN]
    assert run["workers"] == [0, 1]
    assert run["uses"] == [float(run["epochs"])] * 600
    assert run["samples"] == run["epochs"] * 600
    assert (run["lost"], run["faults"]) == ([], [])


def test_the_worker_whose_loss_is_no_number_is_named(found):
    error, (pid,) = found[NAN]["error"], found[NAN]["hit"]
    assert error.startswith("InvalidInput: learning_rate: the loss of worker ")
    assert f"process {pid}) became nan in epoch 1" in error


def test_a_simulated_gpu_uses_every_sample_once_an_epoch(found):
    run = found[ON_GPU]
    assert run["uses"] == [3.0] * 600
    assert run["samples"] == 3 * 600
    assert (run["lost"], run["faults"]) == ([], [])


@pytest.mark.parametrize(("case", "why"), [("kill", "SIGKILL"), ("stop", "did not answer")])
def test_beside_a_simulated_gpu_the_samples_of_a_lost_worker_are_not(found, case: str, why: str):
    """Whichever of the two is lost; without locks, one may overwrite what the other has added."""
    run = found[BESIDE_GPU[case]]
    assert run["samples"] == 3 * 600
    assert max(run["uses"]) <= 3.0
    (lost,) = run["lost"]
    assert why in lost


def test_a_simulated_gpu_does_not_push_a_loss_that_is_no_number(found):
    error = found[BESIDE_GPU["nan"]]["error"]
    assert error.startswith("InvalidInput: learning_rate: the loss of worker ")


def test_a_label_out_of_range_is_named(found):
    assert found[LABEL]["error"] == (
        "InvalidInput: data: training sample 7 has label 2; labels of 2 classes are 0 to 1"
    )


def test_a_batch_larger_than_the_data_is_refused(found):
    assert found[LARGE]["error"].startswith(
        "InvalidInput: batch_size: policy hogbatch gives worker 0 (cpu:1) batches of up to 601 "
    )


def test_a_run_from_the_command_line(paceline, tmp_path: Path):
    # With force: on a busy machine the slow worker may be found to slow the other one down.
    workers = ("--policy", "adaptive", "--workers", "cpu:1,cpu:1@slow=4", "--force")
    quick = ("--profile-s", "0.2", "--epochs", "4", "--json")
    done = paceline(*TRAIN[2:], *workers, "--learning-rate", "0.1", *quick)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert set(result["updates"]["by_worker"]) == set(result["utilisation"]) == {"cpu0", "cpu1"}
    assert min(result["updates"]["by_worker"].values()) > 0
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


@pytest.mark.parametrize("workers", ["cpu:1,gpu:0", "gpu:0"])
def test_a_run_on_a_simulated_gpu_learns_and_conforms_to_its_plan(
    paceline, monkeypatch, workers: str
):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")
    options = ("--policy", "cpu_gpu", "--set", "cpu_batch=[8,64]", "--profile-s", "0.1", "--force")
    done = paceline(
        *TRAIN[2:],
        *("--workers", workers, *options, "--learning-rate", "0.1", "--epochs", "4", "--json"),
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["accuracy"] > 0.85
    assert (result["faults"], result["lost"]) == ([], [])
    assert sum(row["samples"] for row in result["workers"]) == 4 * 1438
    assert all(0 < share <= 1 for share in result["utilisation"].values())
    on_gpu = next(row for row in result["workers"] if row["spec"] == "gpu:0")
    assert on_gpu["samples"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "gpu:0"], "workers: gpu:0: this machine has 0 GPUs"),
        (
            ["--workers", "cpu:1,cpu:1@slow=200", "--policy", "hogbatch"],
            "worker 1 (cpu:1@slow=200) would slow the others down: with it all reach ",
        ),
    ],
)
def test_what_a_worker_finds_wrong_is_one_line(paceline, arguments: list[str], message: str):
    done = paceline(*TRAIN[2:], "--profile-s", "0.1", *arguments)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert message in line
    assert "Traceback" not in done.err
    assert done.out == ""


def training(start, workers: str = "cpu:1"):
    """Start a run that would take minutes, and return it once it trains, and its workers."""
    run = start(*TRAIN, "--workers", workers, *LONG)
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 1/") for line in lines)
    found = [pid for pid, command in run.members().items() if "hogbatch.worker" in command]
    assert len(found) == workers.count("cpu:")
    return run, found


def test_a_killed_coordinator_takes_its_workers_with_it(start):
    run, _ = training(start)
    run.process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
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
    run, workers = training(start, "cpu:1,cpu:1")
    os.kill(workers[0], signal.SIGKILL)
    lines = iter(run.process.stderr.readline, "")
    said = next(line for line in lines if "the others go on" in line)
    assert f"process {workers[0]}) was ended by SIGKILL" in said
    assert any(line.startswith("epoch ") for line in lines)
    os.kill(workers[1], signal.SIGKILL)
    done = run.finish(20)
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert last.startswith("paceline: worker 1 (cpu:1, process ")
    assert last.endswith("was ended by SIGKILL: no worker is left")
