"""Whole runs with worker processes: by the command line, torchrun and a thread of a program."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.plan import Kind
from paceline.record.trace import read_trace
from processes import Started

QUICK = ("--profile-s", "0.2", "--epochs", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FILES = {"result.json", "trace.json", "report.html", "model.safetensors", "run.toml"}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train once with two workers; return the folder of the run, which tests only read."""
    home = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "paceline", "train", "lenet5", "--workers", "2", "--json"]
    done = Started([*command, *QUICK], home).finish()
    assert done.code == 0, done.err
    path = home / "runs" / json.loads(done.out)["id"]
    assert json.loads((path / "result.json").read_text()) == json.loads(done.out)
    return path


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_a_run_writes_its_files_with_consistent_figures(result, folder, accuracy_of):
    assert {path.name for path in folder.iterdir()} == FILES
    assert result["samples_per_s"] == pytest.approx(1438 / 23 / result["step_s"])
    (plan,) = (row for row in result["plans"] if row["strategy"] == "allreduce")
    assert plan["step_s"] == result["predicted_step_s"]
    assert result["accuracy"] == result["epochs"][-1]["score"] > 0.5
    assert accuracy_of(folder / "model.safetensors") == result["accuracy"]
    assert len(result["peak_memory_bytes"]) == 2
    # The measured timeline conforms to the plan.
    assert result["faults"] == []
    measured = read_trace(folder / "trace.json")["measured"]
    assert measured.num_steps() == 20
    # The 61,706 gradients fit in one bucket, which both ranks reduce together.
    (reduction,) = [span for span in measured.spans if (span.step, span.kind) == (0, Kind.REDUCE)]
    assert reduction.name == "s0/reduce[0]"
    assert {resource.owner for resource in reduction.on} == {"cpu0", "cpu1"}


def test_the_same_run_works_under_torchrun_and_gives_the_same_losses(result, start) -> None:
    train = ("-m", "paceline", "train", "lenet5", "--json", *QUICK[:2], "--epochs", "1")
    done = start(*TORCHRUN, *train).finish()
    assert done.code == 0, done.err
    (epoch,) = json.loads(done.out)["epochs"]
    assert epoch["train_loss"] == result["epochs"][0]["train_loss"]


SLOWED = """
import time
from torch import nn

class Slowed(nn.Sequential):
    num_steps = 0

    def forward(self, inputs):
        self.num_steps += self.training
        time.sleep(0.005 if self.num_steps < 150 else 0.03)
        return super().forward(inputs)

def net(num_classes=10):
    return Slowed(nn.Flatten(), nn.Linear(64, num_classes))
"""


@slow
def test_auto_chooses_again_when_steps_change_in_a_late_epoch(outcome, tmp_path: Path) -> None:
    (tmp_path / "slowed.py").write_text(SLOWED)
    how = ("--data", "digits", "--strategy", "auto", "--keep-all", "--workers", "2")
    found = outcome("train", "slowed:net", *how, "--steps", "260", "--profile-s", "0.1")
    # the exchanges to try, the choice, the change of the steps, and the new choice
    assert len(found["decisions"]) >= 4
    assert found["decisions"][-1].startswith(f"auto: {found['strategy']} ")


def test_planning_here_profiles_and_trains_nothing(outcome, tmp_path: Path) -> None:
    plan = outcome("plan", "lenet5", "--profile-s", "0.2")
    rows = plan["plans"]
    same = [row["step_s"] for row in rows if row["is_same_training"]]
    assert same == sorted(same)
    assert [row["strategy"] for row in rows[len(same) :]] == ["local"]
    # Each of two ranks sends 61,706 float32 gradients over the host's link. With `tree`, gradients
    # are sent one way and parameters the other; `host` sums in memory and uses no link.
    sent = {row["strategy"]: row["wire_nbytes_per_step"] for row in rows if row["workers"] == 2}
    assert (sent["allreduce"], sent["tree"], sent["host"]) == (*[2 * 4 * 61_706] * 2, 0)
    # `subbatch` sends the body's 2,572 gradients, and the activations of 64 samples.
    assert 2 * 4 * 2_572 < sent["subbatch"] < sent["allreduce"]
    assert plan["refused"] == []
    assert not (tmp_path / "runs").exists()
    # The plan also has one worker, for comparison.
    [alone] = [row for row in rows if row["workers"] == 1]
    assert (alone["wire_nbytes_per_step"], alone["memory_nbytes"].keys()) == (0, {"cpu0"})


@slow
@pytest.mark.parametrize(
    ("arguments", "strategies", "refused"),
    [
        (("lenet5", "--strategy", "wheel"), {"wheel"}, set()),
        # This model has no head to split.
        (("mlp-64-10",), {"allreduce", "tree", "host", "local"}, {"subbatch"}),
    ],
)
def test_a_plan_here_has_the_strategies_that_can_train(outcome, arguments, strategies, refused):
    plan = outcome("plan", *arguments, "--profile-s", "0.2")
    assert {row["strategy"] for row in plan["plans"]} == strategies
    assert {row["strategy"] for row in plan["refused"]} == refused


# A program without `if __name__ == "__main__"`, as a newcomer writes it.
IN_A_THREAD = """
import threading
import paceline
from paceline.core.errors import WorkersFailed

def train():
    for model in ("lenet5", "lenet6"):
        try:
            print(type(paceline.train(model, workers=1, epochs=1, profile_s=0.1)).__name__)
        except WorkersFailed as error:
            print(error.exit_code)

thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


@slow
def test_a_thread_of_a_program_may_train(start, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(IN_A_THREAD)
    done = start("program.py").finish()
    assert done.code == 0, done.err
    assert done.out.split() == ["Run", "2"]
