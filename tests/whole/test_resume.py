"""Whole commands that resume an interrupted run, or restart one that lost a worker.

tests/ranks compares resumed runs bit for bit, except those of strategies with a hub.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from faults import Pause, failpoints
from processes import Finished, Started, children_of

QUICK = ("--profile-s", "0.2", "--batch-size", "24")
HOST = ("train", "small_recipes:plain", "--strategy", "host", "--workers", "2", *QUICK)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Runs:
    """Starts commands in a folder with small_recipes.py."""

    def __init__(self, start, tmp_path: Path) -> None:
        self._start, self._folder = start, tmp_path
        shutil.copy(Path(__file__).parents[1] / "small_recipes.py", tmp_path)

    def __call__(self, *arguments: str, before: tuple[str, ...] = ()) -> Started:
        return self._start(*before, "-m", "paceline", *arguments)

    def resume(self, *arguments: str) -> Finished:
        where = str(self.folder.relative_to(self._folder))
        return self("train", "--resume", where, "--profile-s", "0.2", *arguments).finish()

    @property
    def folder(self) -> Path:
        """Return the folder of the only run."""
        (found,) = (self._folder / "runs").iterdir()
        return found

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def learnt(self) -> tuple[bytes, list[float]]:
        model = (self.folder / "model.safetensors").read_bytes()
        return model, [one["test_loss"] for one in self.result["epochs"]]


@pytest.fixture
def runs(start, tmp_path: Path) -> Runs:
    return Runs(start, tmp_path)


def test_a_run_stopped_by_ctrl_c_is_resumed(runs: Runs, tmp_path: Path) -> None:
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at("step.done", worker=1, step=30)):
        run = runs(*HOST, "--epochs", "1000", "--checkpoint-every", "never")
    pause.reached()
    run.process.send_signal(signal.SIGINT)
    pause.go_on()
    done = run.finish()
    assert done.code == 130, done.err
    assert f"--resume runs/{runs.folder.name}" in done.err
    assert "Traceback" not in done.err
    assert not (runs.folder / "result.json").exists()
    (checkpoint,) = (runs.folder / "checkpoints").iterdir()
    num_epochs = int(checkpoint.name.removeprefix("step-")) // 25 + 1
    resumed = runs.resume("--epochs", str(num_epochs))
    assert resumed.code == 0, resumed.err
    assert len(runs.result["epochs"]) == num_epochs


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_loses_a_worker_restarts_from_its_checkpoint(runs: Runs, tmp_path, by_torchrun):
    """The launcher restarts the run with --max-restarts; torchrun restarts its ranks itself."""
    pause, asked = Pause(tmp_path / "pause"), (*HOST, "--epochs", "2", "--checkpoint-every", "20")
    with failpoints(pause.at("checkpoint.written", step=20)):
        if by_torchrun:
            run = runs(*asked, before=(*TORCHRUN, "--max-restarts", "1"))
        else:
            run = runs(*asked, "--max-restarts", "1")
    first = pause.reached()
    ranks = children_of(run.process.pid, "small_recipes") if by_torchrun else run.workers()
    (second,) = set(ranks) - {first}
    os.kill(second, signal.SIGKILL)
    done = run.finish()
    assert done.code == 0, done.err
    (lost,) = runs.result["lost"]
    assert by_torchrun or f"(process {second})" in lost
    assert "after step 20" in lost
    assert len(runs.result["epochs"]) == 2


@pytest.mark.slow
def test_a_run_with_a_coordinator_resumes_bit_for_bit(runs: Runs) -> None:
    """Strategy wheel has a test of its own: test_a_killed_hub_resumes_from_its_checkpoint."""
    asked = ("train", "small_recipes:classes", "--strategy", "hogbatch", "--workers", "cpu:1")
    more = ("--strategy-option", "policy=hogbatch", "--epochs", "10", "--checkpoint-every", "37")
    begun = runs(*asked, *QUICK, *more).finish()
    assert begun.code == 0, begun.err
    expected = runs.learnt
    for name in ("model.safetensors", "result.json"):
        (runs.folder / name).unlink()
    resumed = runs.resume()
    assert resumed.code == 0, resumed.err
    assert runs.learnt == expected
