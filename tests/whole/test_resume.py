"""Whole commands that resume an interrupted run, or restart one that lost a worker.

tests/ranks compares resumed runs bit for bit, except those of strategies with a hub.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import Pause, failpoints
from processes import Started, children_of

QUICK = ("--profile-s", "0.2", "--batch-size", "24")
HOST = ("train", "small_recipes:plain", "--strategy", "host", "--workers", "2", *QUICK)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


Run = Callable[..., Started]


@pytest.fixture
def run(start: Callable[..., Started], tmp_path: Path) -> Run:
    """Start a command in a folder with small_recipes.py."""
    shutil.copy(Path(__file__).parents[1] / "small_recipes.py", tmp_path)
    return lambda *arguments, before=(): start(*before, "-m", "paceline", *arguments)


def the_run_in(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "runs").iterdir()
    return found


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_a_run_stopped_by_ctrl_c_is_resumed(run: Run, tmp_path: Path) -> None:
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at("step.done", worker=1, step=30)):
        stopped = run(*HOST, "--epochs", "1000", "--checkpoint-every", "never")
    pause.reached()
    stopped.process.send_signal(signal.SIGINT)
    pause.go_on()
    done = stopped.finish()
    assert done.code == 130, done.err
    folder = the_run_in(tmp_path)
    resume = ("--resume", f"runs/{folder.name}")
    assert " ".join(resume) in done.err
    assert "Traceback" not in done.err
    assert not (folder / "result.json").exists()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    num_epochs = int(checkpoint.name.removeprefix("step-")) // 25 + 1
    resumed = run("train", *resume, "--profile-s", "0.2", "--epochs", str(num_epochs)).finish()
    assert resumed.code == 0, resumed.err
    assert len(result_of(folder)["epochs"]) == num_epochs


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_run_that_loses_a_worker_restarts_from_its_checkpoint(run: Run, tmp_path, by_torchrun):
    """The launcher restarts the run with --max-restarts; torchrun restarts its ranks itself."""
    pause, asked = Pause(tmp_path / "pause"), (*HOST, "--epochs", "2", "--checkpoint-every", "20")
    with failpoints(pause.at("checkpoint.written", step=20)):
        if by_torchrun:
            begun = run(*asked, before=(*TORCHRUN, "--max-restarts", "1"))
        else:
            begun = run(*asked, "--max-restarts", "1")
    first = pause.reached()
    ranks = children_of(begun.process.pid, "small_recipes") if by_torchrun else begun.workers()
    (second,) = set(ranks) - {first}
    os.kill(second, signal.SIGKILL)
    done = begun.finish()
    assert done.code == 0, done.err
    result = result_of(the_run_in(tmp_path))
    (lost,) = result["lost"]
    assert by_torchrun or f"(process {second})" in lost
    assert "after step 20" in lost
    assert len(result["epochs"]) == 2
