"""Strategy local from its checkpoints, and under torchrun."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from local_runs import QUICK, RECIPE, LocalRuns, Run, check_whole, first_loss
from processes import wait_for_checkpoint
from rpc_exchange import free_port

pytestmark = pytest.mark.slow

ROUNDS = ("--set", "sync_every=8", "--set", "fragments=2", "--set", "codec=onebit")
EVERY = ("--checkpoint-every", "40")
MANY = 30


def resumed(runs: LocalRuns, folder: Path, *options: str) -> Run:
    asked = ("--resume", str(folder), "--profile-s", "0", *options)
    return Run(runs.start("-m", "paceline", "train", *asked, "--json"))


def test_a_killed_hub_goes_on_from_its_checkpoint_bit_for_bit(runs: LocalRuns) -> None:
    whole = runs.train(*ROUNDS, epochs=MANY).result()
    slow = runs.flag("slow")
    run = runs.train(*ROUNDS, *EVERY, "--output", "killed", epochs=MANY)
    folder = wait_for_checkpoint(runs.folder / "killed", run.started)
    run.started.process.send_signal(signal.SIGKILL)
    run.started.process.wait()
    assert not run.started.members()  # workers end with their hub
    slow.unlink()
    result = resumed(runs, folder).result()
    check_whole(result, MANY)
    assert runs.model(result, "killed") == runs.model(whole)
    losses = [[one["train_loss"] for one in found["epochs"]] for found in (result, whole)]
    assert losses[0] == losses[1]


def test_workers_of_elsewhere_go_on_with_a_hub_that_was_killed(runs: LocalRuns) -> None:
    whole = runs.train(*ROUNDS, epochs=MANY).result()
    slow, address = runs.flag("slow"), f"tcp://127.0.0.1:{free_port()}"
    hub = runs.hub(*ROUNDS, *EVERY, "--bind", address, "--output", "killed", epochs=MANY)
    hub.address()
    workers = [runs.worker(address, number, "--deadline-s", "600") for number in range(2)]
    folder = wait_for_checkpoint(runs.folder / "killed", hub.started)
    hub.started.process.send_signal(signal.SIGKILL)
    hub.started.process.wait()
    slow.unlink()
    again = ("hub", "--strategy", "local", "--resume", str(folder), "--bind", address, "--json")
    result = Run(runs.start("-m", "paceline", *again, "--profile-s", "0")).result()
    for worker in workers:
        assert "the hub has restarted" in worker.finish().err
    check_whole(result, MANY)
    assert result["lost"] == []
    assert runs.model(result, "killed") == runs.model(whole)


@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_goes_on_with_the_groups_parameters(
    runs: LocalRuns, workers: int
) -> None:
    rounds = (*ROUNDS[:4], "--set", "codec=dynamic8")
    run = runs.train(*rounds, *EVERY, "--output", "interrupted", epochs=MANY)
    folder = wait_for_checkpoint(runs.folder / "interrupted", run.started)
    run.started.process.send_signal(signal.SIGINT)
    done = run.finish(130)
    assert f"--resume interrupted/{folder.name} goes on" in done.err
    again = resumed(runs, folder, "--workers", str(workers), "--evaluate-every", "8")
    result = again.result()
    check_whole(result, MANY)
    assert result["lost"] == []
    # What was learnt is there from the first round on.
    assert result["evaluations"][0]["test_loss"] < first_loss() / 2


def children_of(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def ranks_of(torchrun: int) -> dict[int, int]:
    """Return the process of each rank."""
    found = {}
    for pid in children_of(torchrun):
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
            environment = dict(one.partition("=")[::2] for one in entries)
            if "RANK" in environment:  # the others are the tests' own
                found[int(environment["RANK"])] = pid
    return found


def under_torchrun(
    runs: LocalRuns, *options: str, restarts: int = 0, output: str = "runs", afresh: bool = False
) -> Run:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    torchrun = (*torchrun, "--max-restarts", str(restarts))
    asked = ("train", RECIPE, "--strategy", "local", *QUICK, "--epochs", str(MANY), *ROUNDS)
    command = (*torchrun, "-m", "paceline", *asked, *options, "--output", output, "--json")
    return Run(runs.start("-m", *command, afresh=afresh))


def test_ranks_of_torchrun_are_workers_and_learn_the_same(runs: LocalRuns) -> None:
    whole = runs.train(*ROUNDS, epochs=MANY).result()
    result = under_torchrun(runs, output="ranks").result()
    check_whole(result, MANY)
    assert result["lost"] == []
    assert runs.model(result, "ranks") == runs.model(whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_killed_ranks_again_from_the_last_checkpoint(
    runs: LocalRuns, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    whole = runs.train(*ROUNDS, epochs=MANY).result()
    slow, temporary = runs.flag("slow"), runs.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    # Afresh: a forked process has read TMPDIR long ago.
    run = under_torchrun(runs, *EVERY, restarts=1, output="killed", afresh=True)
    wait_for_checkpoint(runs.folder / "killed", run.started)
    os.kill(ranks_of(run.started.process.pid)[rank], signal.SIGKILL)
    slow.unlink()
    done = run.started.finish()
    assert done.code == 0, done.err
    assert not list(temporary.glob("paceline-*"))
    (folder,) = (runs.folder / "killed").iterdir()
    assert (folder / "model.safetensors").read_bytes() == runs.model(whole)
    assert (
        "torchrun has started the workers again once; from the checkpoint after"
        in done.err + (folder / "result.json").read_text()
    )
