"""Strategy wheel as real processes: the same training, the formula's bytes, and who may die."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launched import PROGRAMS
from processes import Started, wait_for_checkpoint

TURNING = str(PROGRAMS / "turning.py")
TRAIN = ("-m", "paceline", "train", "lenet5", "--strategy", "wheel", "--profile-s", "0.05")
ONE = ("--workers", "1", "--set", "lanes=1", "--set", "staleness=0")
WORKER = "wheel.worker"


def ran(start, *arguments: object) -> dict:
    done = start(TURNING, *map(str, arguments)).finish()
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return json.loads(done.out)


@pytest.mark.parametrize("head", ["fc1", "loss"])
def test_one_worker_trains_as_if_nobody_had_cut_the_model(start, head: str):
    """With the loss alone as the head, too, and then no byte of a head is counted."""
    found = ran(start, "alone", 2, head)
    assert found["same"]
    assert all(found["same"].values()), found["same"]
    assert found["bytes"] == found["formula"]
    assert (found["bytes"]["head_gradients"] > 0) == (head == "fc1")
    assert found["staleness"] == {"0": 60}
    assert found["samples"] == 2 * 1438
    assert (found["faults"], found["lost"]) == ([], [])


def test_workers_train_a_model_without_a_head_asynchronously(start):
    """It was refused; the paper's answer is asynchronous data parallelism."""
    found = ran(start, "many", 3, 2, json.dumps({"head": "loss", "staleness": 4}))
    assert found["bytes"] == found["formula"]
    assert found["steps"] == [60] * 3
    assert (found["faults"], found["lost"]) == ([], [])
    assert found["accuracy"][-1] > 0.75


@pytest.mark.parametrize(("workers", "lanes", "staleness"), [(3, 2, 1), (2, 1, 0)])
def test_bytes_by_purpose_are_those_of_the_plan_and_the_trace_conforms(
    start, workers: int, lanes: int, staleness: int
):
    found = ran(start, "many", workers, lanes, json.dumps({"staleness": staleness}))
    assert found["bytes"] == found["formula"]
    assert min(found["bytes"].values()) > 0
    assert found["samples"] == 2 * 1438
    assert found["steps"] == [60] * workers
    assert (found["faults"], found["lost"]) == ([], [])
    assert found["accuracy"][-1] > 0.75
    assert found["losses"][1] < found["losses"][0]
    travelled = sum(n for purpose, n in found["bytes"].items() if not purpose.startswith("head"))
    assert sum(found["wire"]) > travelled
    # Between a worker's fetch and its update nobody else takes more steps than the bound allows.
    most = (workers - 1) * (2 * staleness + 1) + (lanes > 1)  # lanes fetch before their own
    assert max(map(int, found["staleness"])) <= most


def test_a_run_from_the_command_line(paceline, tmp_path: Path):
    codec = "gradients=dynamic8,activations=dynamic8,activation_gradients=half,parameters=bfloat16"
    arguments = ("--workers", "2", "--set", "lanes=2", "--codec", codec, "--epochs", "2")
    done = paceline(*TRAIN[2:], *arguments, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["epochs"][-1]["score"] > 0.8
    assert [row["nbytes"] for row in result["traffic"]] == [
        row["planned_nbytes"] for row in result["traffic"]
    ]
    assert (result["faults"], result["lost"]) == ([], [])
    assert result["predicted_step_s"] > 0
    assert result["step_s"] > 0
    assert list(result["utilisation"]) == list(result["predicted_utilisation"]) == ["cpu1"]
    updates = result["updates"]
    assert sum(updates["staleness"]["all workers"].values()) == updates["count"] == 2 * 2 * 23
    (folder,) = (tmp_path / "runs").iterdir()
    page = (folder / "report.html").read_text()
    for title in ("Bytes by purpose", "Staleness", "Utilisation", "Two steps in time"):
        assert f"<h2>{title}</h2>" in page
    again = paceline("report", str(folder))
    assert again.code == 0, again.err
    assert load_file(folder / "model.safetensors")


def lines_until(run: Started, what: str) -> str:
    """Return the first line of standard error that contains it."""
    seen = []
    for line in iter(run.process.stderr.readline, ""):
        seen.append(line)
        if what in line:
            return line
    raise AssertionError("".join(seen))


def training(start, *more: str) -> tuple[Started, list[int]]:
    """Start a run that would take minutes, and return it once it trains, and its bodies."""
    run = start(*TRAIN, "--epochs", "1000", *more)
    lines_until(run, "epoch 1/")
    return run, sorted(pid for pid, command in run.members().items() if WORKER in command)


def test_a_killed_body_is_missed_by_nobody(start):
    run, bodies = training(start, "--workers", "4", "--set", "lanes=2")
    assert len(bodies) == 2
    os.kill(bodies[0], signal.SIGKILL)
    said = lines_until(run, "its half-done step is dropped")
    assert f"worker 0 (process {bodies[0]}) was ended by SIGKILL" in said
    lines_until(run, "epoch ")
    os.kill(bodies[1], signal.SIGKILL)
    done = run.finish(30)
    assert done.code == 1
    assert "no worker is left" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


FAILING = """
import sys
from torch import nn

pytestmark = pytest.mark.slow

class Bang(nn.Module):
    calls = 0
    def forward(self, values):
        Bang.calls += 1
        if "worker" in sys.argv[0] and Bang.calls > 50:
            raise RuntimeError("bang")
        return values

def net():
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), Bang(), nn.Flatten(), nn.Linear(144, 200)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(200, 10))
"""


def test_what_fails_in_a_body_is_said_in_one_line(paceline, tmp_path: Path):
    (tmp_path / "failing.py").write_text(FAILING)
    done = paceline("train", "failing:net", *TRAIN[4:], "--epochs", "100")
    assert done.code == 1
    assert "Traceback" not in done.err
    assert re.fullmatch(
        r"paceline: worker [01] failed: RuntimeError: bang \(worker [01,]+ at failing.py:\d+\)",
        done.err.splitlines()[-1],
    )


def test_a_killed_hub_takes_the_bodies_of_its_machine_with_it(start):
    run, bodies = training(start, "--workers", "2")
    assert len(bodies) == 1
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


HUB = ("-m", "paceline", "hub", "lenet5", "--profile-s", "0", "--epochs", "3")


def test_a_hub_that_was_killed_goes_on_from_its_snapshot(start, paceline, tmp_path: Path):
    written = paceline("hub", "--generate-keys", "keys")
    assert written.code == 0, written.err
    keys, kept = ("--keys", "keys"), ("--checkpoint-every", "0.05s")
    hub = start(*HUB, *ONE, *keys, *kept, "--bind", "tcp://127.0.0.1:0")
    address = re.search(r"tcp://\S+", lines_until(hub, "listening on"))[0].rstrip(";")
    joining = ("--connect", address, "--as", "0", "--threads", "1", "--device", "cpu")
    worker = start("-m", "paceline", "worker", *joining, *keys)
    lines_until(hub, "epoch 2/3")
    worker.process.send_signal(signal.SIGSTOP)  # or the run might end before its disk is as far
    folder = wait_for_checkpoint(tmp_path / "runs", hub)
    hub.process.send_signal(signal.SIGKILL)
    hub.process.wait()
    worker.process.send_signal(signal.SIGCONT)
    # Model, data and so on are those of that run, which says them itself.
    again = start(*HUB[:3], "--resume", str(folder), "--bind", address, "--json")
    done = again.finish()
    assert done.code == 0, done.err
    assert f"resumed from {folder}/checkpoints, written at " in done.err
    assert "updates made after that are lost" in done.err
    ended = worker.finish(20)
    assert ended.code == 0, ended.err
    assert "the hub has restarted" in ended.err
    result = json.loads(done.out)
    assert (result["updates"]["count"], len(result["epochs"])) == (3 * 23, 3)
    whole = start(*TRAIN, *ONE, "--epochs", "3", "--output", "whole", "--json").finish()
    assert whole.code == 0, whole.err
    own = load_file(tmp_path / "runs" / result["id"] / "model.safetensors")
    other = load_file(tmp_path / "whole" / json.loads(whole.out)["id"] / "model.safetensors")
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_a_process_with_the_wrong_workers_is_told_which_belong_together(start):
    hub = start(*HUB, "--workers", "4", "--bind", "tcp://127.0.0.1:0", "--wait-s", "60")
    address = re.search(r"tcp://\S+", lines_until(hub, "listening on"))[0].rstrip(";")
    worker = start("-m", "paceline", "worker", "--connect", address, "--as", "1,2")
    done = worker.finish(30)
    assert done.code == 2
    assert "workers: 1,2 on one device, but with lanes=2 of 4 the hub expects 0,1 there" in done.err
    other = start("-m", "paceline", "worker", "--connect", address, "--run", "another")
    done = other.finish(30)
    assert done.code == 2
    assert "run id: the hub's run is 'paceline', this worker's 'another'" in done.err
    os.killpg(hub.process.pid, signal.SIGINT)
    assert hub.finish(20).code == 130
