"""Strategy local as whole commands: workers and hubs that are killed, rehearsals, torchrun."""

import json
import os
import signal
from pathlib import Path

import pytest

from faults import Pause, failpoints
from local_runs import QUICK, RECIPE, LocalRuns, Run, check_whole
from paceline.record.trace import read_trace

ROUNDS = ("--set", "sync_every=8", "--set", "fragments=2")
CODED = (*ROUNDS, "--set", "codec=onebit")
EVERY = ("--checkpoint-every", "40")
EPOCHS = 6
KILLED = {"at": "checkpoint.written", "do": "SIGKILL"}  # the hub, which alone writes any
ONCE = {"step": 40}


def test_a_run_from_the_command_line(runs: LocalRuns) -> None:
    result = runs.train(*CODED, "--evaluate-every", "8").result()
    check_whole(result, 4)
    assert result["lost"] == []
    assert result["evaluations"][-1]["test_loss"] < result["evaluations"][0]["test_loss"]
    assert runs.model(result)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--set", "delay=2", "--set", "mixing=0.5")])
def test_a_killed_worker_is_started_again_and_joins_while_the_others_go_on(runs, options):
    slow = runs.slow()
    with failpoints({"at": "worker.pushed", "worker": 1, "step": 3, "do": "SIGKILL"}):
        run = runs.train(*ROUNDS, *options, workers=3, epochs=EPOCHS)
        assert "worker 1 " in run.until("takes part from round")
    slow.unlink()
    result = run.result()
    check_whole(result, EPOCHS)
    (why,) = result["lost"]
    assert why.startswith("worker 1 ")
    assert "SIGKILL" in why
    assert not [path for path in Path("/dev/shm").iterdir() if "paceline" in path.name]


@pytest.mark.slow
def test_workers_that_all_fail_again_and_again_end_the_run(runs: LocalRuns) -> None:
    """At once, and not after ten minutes (wait_s): nobody of elsewhere can come."""
    done = runs.train(*ROUNDS, recipe="local_recipes:failing").finish(1)
    assert "RuntimeError: bang" in done.err.splitlines()[-1]


def resumed(runs: LocalRuns, folder: Path, *options: str, command: str = "train") -> Run:
    asked = (command, "--resume", str(folder), "--profile-s", "0", "--json", *options)
    return runs.paceline(*asked)


def folder_of(runs: LocalRuns) -> Path:
    (folder,) = (runs.folder / "killed").iterdir()
    return folder


@pytest.mark.slow
def test_a_killed_hub_goes_on_from_its_checkpoint_bit_for_bit(runs: LocalRuns) -> None:
    """Its own workers end with it; those of elsewhere go on with the next hub."""
    whole = runs.train(*CODED, epochs=EPOCHS).result()
    with failpoints(KILLED):
        run = runs.train(*CODED, *EVERY, "--output", "killed", epochs=EPOCHS)
        assert run.started.process.wait() == -signal.SIGKILL
    assert not run.started.members()
    found = resumed(runs, folder_of(runs)).result()
    check_whole(found, EPOCHS)
    assert runs.model(found, "killed") == runs.model(whole)
    losses = [[one["train_loss"] for one in result["epochs"]] for result in (found, whole)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_workers_of_elsewhere_go_on_with_a_hub_that_was_killed(runs: LocalRuns) -> None:
    whole = runs.train(*CODED, epochs=EPOCHS).result()
    with failpoints(KILLED):
        hub = runs.hub(*CODED, *EVERY, "--output", "killed", epochs=EPOCHS)
        address = hub.address()
        workers = [runs.worker(address, number, "--deadline-s", "600") for number in range(2)]
        hub.started.process.wait()
    again = ("--strategy", "local", "--bind", address)
    result = resumed(runs, folder_of(runs), *again, command="hub").result()
    for worker in workers:
        worker.finish()
    check_whole(result, EPOCHS)
    assert result["lost"] == []
    assert runs.model(result, "killed") == runs.model(whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_goes_on_with_the_groups_parameters(runs, workers):
    with failpoints(KILLED | {"do": "SIGINT", "visit": 1}):
        run = runs.train(*ROUNDS, *EVERY, "--output", "killed", epochs=EPOCHS)
        assert "--resume " in run.finish(130).err
    again = ("--workers", str(workers), "--evaluate-every", "8")
    result = resumed(runs, folder_of(runs), *again).result()
    check_whole(result, EPOCHS)
    assert result["lost"] == []
    # What was learnt is there from the first round on.
    assert result["evaluations"][0]["test_loss"] < 50


def under_torchrun(
    runs: LocalRuns, *options: str, restarts: int = 0, output: str = "runs", afresh: bool = False
) -> Run:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    torchrun = (*torchrun, "--max-restarts", str(restarts))
    asked = ("train", RECIPE, "--strategy", "local", *QUICK, "--epochs", str(EPOCHS), *CODED)
    command = (*torchrun, "-m", "paceline", *asked, *options, "--output", output, "--json")
    return Run(runs.start("-m", *command, afresh=afresh))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, "worker", "hub"])
def test_ranks_of_torchrun_are_workers_and_killed_ones_are_started_again(runs, monkeypatch, killed):
    """From the checkpoint after step 40, which is that after the ninth exchange."""
    whole = runs.train(*CODED, epochs=EPOCHS).result()
    temporary = runs.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    pause = Pause(runs.folder / "pause")
    armed = {"worker": [pause.at("worker.pushed", worker=1, step=13)], "hub": [KILLED | ONCE]}
    with failpoints(*armed.get(killed, [])):
        # Afresh: a forked process has read TMPDIR long ago.
        run = under_torchrun(runs, *EVERY, restarts=1, output="killed", afresh=True)
        if killed == "worker":
            os.kill(pause.reached(), signal.SIGKILL)
            pause.reached()
            pause.go_on()
        done = run.started.finish()
    assert done.code == 0, done.err
    assert not list(temporary.glob("paceline-*"))
    assert (folder_of(runs) / "model.safetensors").read_bytes() == runs.model(whole)


PACE = (
    *("--device", "p100", "--forward-ms", "4", "--backward-ms", "8", "--update-ms", "1"),
    *("--steps", "24"),
)
REHEARSE = ("rehearse", "lenet5", "--strategy", "local", "--profile-s", "0.2", "--json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("sync_every=12", "fragments=2", "delay=2"),
        ("sync_every=6", "codec=threshold:0.001@0.1"),
    ],
)
def test_a_rehearsal_takes_the_devices_times_and_conforms_to_the_plan(runs, options):
    own = [word for option in options for word in ("--set", option)]
    result = runs.paceline(*REHEARSE, *PACE, *own).result()
    assert result["origin"] == "rehearsed"
    assert (result["faults"], result["lost"], result["epochs"]) == ([], [], [])
    assert result["step_s"] >= 0.99 * 0.013
    (folder,) = (runs.folder / "runs").iterdir()
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    assert not (folder / "model.safetensors").exists()
    if "threshold" in options[-1]:
        assert result["sent_share"]["measured"] == round(0.1 * 61_706) / 61_706
        assert result["sent_share"]["warning"] is None


@pytest.mark.slow
def test_a_worker_that_is_four_times_as_fast_takes_more_inner_steps(runs: LocalRuns) -> None:
    asked = ("--stretch", "1,4", "--balance", "auto", "--set", "sync_every=20", "--steps", "60")
    result = runs.paceline(*REHEARSE, *asked, "--profile-s", "1").result()
    assert (result["faults"], result["lost"]) == ([], [])
    fast, slow = result["shares"]
    assert fast + slow == 64
    # Four times by the layers; other processes of the machine may slow one of the two down.
    assert fast > 1.5 * slow


UNEVEN = """
import os, time
from local_recipes import *
from local_recipes import loss as _loss, steady as _steady
from dataclasses import replace

def loss(outputs, targets):
    if torch.is_grad_enabled():
        time.sleep(0.3 if ["--as", "1"] == os.sys.argv[4:6] else 0.003)
    return _loss(outputs, targets)

def steady():
    return replace(_steady(), loss=loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_worker_that_would_not_help_is_refused_unless_by_force(runs, force):
    """Of 3 ms a step and of 300 ms: the second gains less than the planner asks for."""
    (runs.folder / "uneven.py").write_text(UNEVEN)
    asked = ("--balance", "auto", "--profile-s", "0.5", "--set", "sync_every=8", *force)
    hub = runs.hub(*asked, recipe="uneven:steady", epochs=2)
    address = hub.address()
    workers = [runs.worker(address, number) for number in range(2)]
    code = 0 if force else 2
    done = hub.finish(code)
    for worker in workers:
        worker.finish(code)
    if force:
        shares = json.loads(done.out)["shares"]
        assert shares[0] > shares[1]
    else:
        assert not list(runs.folder.glob("runs/*/model.safetensors"))
