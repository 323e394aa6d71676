"""`paceline train --elastic` restarts killed workers, and ends on errors and Ctrl-C."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from processes import Started, awaited

pytest.importorskip("torchft")
pytestmark = pytest.mark.timeout(600)
RECIPES = Path(__file__).parents[1] / "small_recipes.py"
RUN = ("--strategy", "local", "--elastic")
TRAIN = ("-m", "paceline", "train", "small_recipes:with_dropout", *RUN)
SIZES = (
    *("--workers", "3", "--batch-size", "24", "--timeout", "10"),
    *("--strategy-option", "sync_every=5"),
)


@pytest.fixture(autouse=True)
def recipes(tmp_path: Path) -> None:
    shutil.copy(RECIPES, tmp_path)


def workers_of(run: Started, count: int) -> dict[int, int]:
    """Wait until `count` workers run; return their process ids by worker number."""

    def found() -> dict[int, int] | None:
        lines = {pid: line for pid, line in run.members().items() if "runs.elastic" in line}
        pids = {int(line.rsplit(" ", 2)[1]): pid for pid, line in lines.items()}
        return pids if len(pids) == count else None

    pids: dict[int, int] = awaited(found)
    return pids


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_worker_is_restarted_and_the_run_succeeds(start, tmp_path, number) -> None:
    run = start(*TRAIN, *SIZES, "--epochs", "120", "--json", "--checkpoint-every", "never")
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 2/") for line in lines)
    before = workers_of(run, 3)
    os.kill(before[number], signal.SIGKILL)
    done = run.finish()
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["epochs"][-1]["number"] == 119
    assert result["epochs"][-1]["test_loss"] < 0.2
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "model.safetensors").exists()


def test_ctrl_c_ends_all_workers(start) -> None:
    run = start(*TRAIN, *SIZES, "--epochs", "10000")
    lines = iter(run.process.stderr.readline, "")
    assert any(line.startswith("epoch 2/") for line in lines)
    run.process.send_signal(signal.SIGINT)
    done = run.finish()
    assert done.code == 130, done.err
    assert "Traceback" not in done.err
