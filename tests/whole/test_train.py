"""Whole runs with real worker processes: by the command line, by torchrun and by a program."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.core.plan import Kind
from paceline.data import load
from paceline.models.networks import LeNet5
from paceline.record.trace import read_trace
from processes import Started
from refusals import refused_field

QUICK = ("--profile-s", "0.2", "--epochs", "2")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FILES = {"result.json", "trace.json", "report.html", "model.safetensors", "run.toml"}
slow = pytest.mark.slow


def losses(result: dict[str, Any], name: str = "train_loss") -> list[float]:
    return [row[name] for row in result["epochs"]]


def accuracy_of(weights: Path) -> float:
    """What a fresh model with these weights gets right."""
    model = LeNet5().eval()
    model.load_state_dict(load_file(weights))
    test = load("digits", (1, 32, 32), seed=0).test
    inputs, targets = test.__getitems__(range(len(test)))
    return int((model(inputs).argmax(1) == targets).sum()) / len(test)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with two workers, for all tests that only look at what it wrote."""
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


def planned(result: dict[str, Any], strategy: str) -> dict[str, Any]:
    (row,) = (row for row in result["plans"] if row["strategy"] == strategy)
    return row


def test_a_run_writes_its_files_and_their_figures_fit_together(result, folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    assert result["samples_per_s"] == pytest.approx(1438 / 23 / result["step_s"])
    assert planned(result, "allreduce")["step_s"] == result["predicted_step_s"]
    assert result["accuracy"] == result["epochs"][-1]["score"] > 0.5
    assert accuracy_of(folder / "model.safetensors") == result["accuracy"]
    assert len(result["peak_memory_bytes"]) == 2


def test_the_measured_timeline_conforms_to_the_plan(result, folder: Path) -> None:
    assert result["faults"] == []
    measured = read_trace(folder / "trace.json")["measured"]
    assert measured.num_steps() == 20
    # 61,706 gradients fit in one bucket, which both ranks reduce together.
    reductions = [span for span in measured.spans if (span.step, span.kind) == (0, Kind.REDUCE)]
    assert [span.name for span in reductions] == ["s0/reduce[0]"]
    assert {resource.owner for resource in reductions[0].on} == {"cpu0", "cpu1"}


def test_compare_and_report_work_on_the_files_alone(result, folder: Path, paceline) -> None:
    again = json.loads(paceline("compare", str(folder), "--json").out)["rows"]
    for row, written in zip(again, result["comparison"]["rows"], strict=True):
        assert row["quantity"] == written["quantity"]
        for side in ("left_s", "right_s"):  # the trace counts nanoseconds
            assert row[side] == pytest.approx(written[side], abs=2e-9)
    report = folder / "report.html"
    report.unlink()
    assert paceline("report", str(folder)).code == 0
    assert report.exists()


def test_the_same_run_works_under_torchrun_and_gives_the_same_losses(result, start) -> None:
    train = ("-m", "paceline", "train", "lenet5", "--json", *QUICK[:2], "--epochs", "1")
    done = start(*TORCHRUN, *train).finish()
    assert done.code == 0, done.err
    assert losses(json.loads(done.out)) == losses(result)[:1]


@slow
def test_the_file_of_a_run_repeats_it(result, folder: Path, outcome) -> None:
    again = outcome("train", "--config", str(folder / "run.toml"))
    assert again["settings"] == result["settings"]
    assert losses(again) == losses(result)


# Each rank of torchrun has settings of its own, as on machines with different files.
UNEQUAL = """
import os, sys
from paceline.cli import main

sys.argv[1:] = ["train", "lenet5", "--profile-s", "0.2", "--seed", os.environ["RANK"]]
main()
"""


@slow
def test_ranks_with_other_settings_are_refused_before_they_train(start, tmp_path: Path) -> None:
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    done = start(*TORCHRUN, "unequal.py").finish()
    assert (done.code, refused_field(done.err)) == (1, "seed")  # the code is torchrun's
    assert not (tmp_path / "runs").exists()


@slow
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_takes_the_same_steps_as_two(outcome, result, workers: int) -> None:
    # 1,438 samples in 23 steps of 62 or 63: three ranks get unequal shares, weighted by their size.
    other = outcome("train", "lenet5", *QUICK, "--workers", str(workers))
    for name in ("train_loss", "test_loss"):
        assert losses(other, name) == pytest.approx(losses(result, name), rel=1e-4)
    exchanged = planned(other, "allreduce")["wire_nbytes_per_step"]
    assert exchanged == pytest.approx(2 * (workers - 1) * 4 * 61_706)


def test_planning_here_profiles_and_trains_nothing(outcome, tmp_path: Path) -> None:
    plan = outcome("plan", "lenet5", "--profile-s", "0.2")
    rows = plan["plans"]
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    # 61,706 float32 gradients: each of two ranks sends all of them through the host's link. By a
    # tree the gradients go one way and the parameters the other; the host's sum has no link.
    sent = {row["strategy"]: row["wire_nbytes_per_step"] for row in rows if row["workers"] == 2}
    assert (sent["allreduce"], sent["tree"], sent["host"]) == (*[2 * 4 * 61_706] * 2, 0)
    # With a split head only the body's 2,572 gradients travel, and activations of 64 samples.
    assert 2 * 4 * 2_572 < sent["subbatch"] < sent["allreduce"]
    assert plan["refused"] == []
    assert not (tmp_path / "runs").exists()
    # One worker has been measured, too, or nobody knows what the second one brings.
    [alone] = [row for row in rows if row["workers"] == 1]
    assert (alone["wire_nbytes_per_step"], alone["memory_nbytes"].keys()) == (0, {"cpu0"})


@slow
@pytest.mark.parametrize(
    ("arguments", "strategies", "refused"),
    [
        (("lenet5", "--strategy", "wheel"), {"wheel"}, set()),
        (("mlp-64-10",), {"allreduce", "tree", "host"}, {"subbatch"}),  # it has no head to split
    ],
)
def test_a_plan_here_is_of_the_strategies_that_can_train(outcome, arguments, strategies, refused):
    plan = outcome("plan", *arguments, "--profile-s", "0.2")
    assert {row["strategy"] for row in plan["plans"]} == strategies
    assert {row["strategy"] for row in plan["refused"]} == refused


MINE = """
from torch import nn

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
"""


@slow
@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        (("mlp-500-8-983", "--data", "delicious-like:samples=300"), "precision@1"),
        (("mine:net",), "accuracy"),
    ],
)
def test_a_score_is_called_by_its_name(paceline, tmp_path: Path, arguments, score: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = paceline("train", *arguments, *QUICK)
    assert done.code == 0, done.err
    assert f", {score} " in done.err
    assert f"\n{score} " in done.out
    (other,) = {"accuracy", "precision@1"} - {score}
    assert other not in done.out + done.err
    (folder,) = (tmp_path / "runs").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["score"], result["faults"]) == (score, [])


# Programs. As a newcomer writes it: nothing protects the module from being imported by its workers.

PROGRAM = """
import json
import paceline

run = paceline.train("lenet5", workers=2, epochs=2, profile_s=0.2, options={"bucket_mb": 5})
wanted = run.report("mine.html")
again = run.report(run.folder / "report.html")
print(json.dumps({
    "accuracy": run.accuracy,
    "result": json.loads(run.result.model_dump_json()),
    "timeline": [run.timeline.origin, run.timeline.num_steps()],
    "folder": str(run.folder),
    "reports": [str(wanted), str(again)],
    "alike": wanted.read_bytes() == again.read_bytes(),
}))
"""
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


@pytest.fixture
def program(start, tmp_path: Path):
    """Run a program to its end; return the lines that it has printed."""

    def run(text: str, *launcher: str) -> list[str]:
        (tmp_path / "program.py").write_text(text)
        done = start(*launcher, "program.py").finish()
        assert done.code == 0, done.err
        return done.out.splitlines()

    return run


def test_a_program_trains_and_looks_at_its_run(program, tmp_path: Path) -> None:
    # What the program prints is its own: progress and tables stay away from its output.
    (line,) = program(PROGRAM)
    said = json.loads(line)
    folder = tmp_path / said["folder"]
    assert folder.parent == tmp_path / "runs"
    assert {path.name for path in folder.iterdir()} == FILES
    assert said["result"] == json.loads((folder / "result.json").read_text())
    assert said["accuracy"] == said["result"]["accuracy"] > 0.5
    assert said["result"]["settings"]["options"] == {"bucket_mb": 5}
    assert said["timeline"] == ["measured", 20]
    assert said["reports"] == ["mine.html", f"{said['folder']}/report.html"]
    assert said["alike"]


@slow
def test_a_thread_of_a_program_may_train(program) -> None:
    assert program(IN_A_THREAD) == ["Run", "2"]
