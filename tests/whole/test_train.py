"""Whole runs with real worker processes."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.core.plan import Kind
from paceline.record.trace import read_trace
from processes import Started

QUICK = ("--profile-s", "0.2", "--epochs", "2")


def trained(paceline, *arguments: str) -> dict:
    done = paceline("train", "lenet5", "--data", "digits", "--json", *QUICK, *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One run with two workers, for all tests that only look at what it wrote."""
    home = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "paceline", "train", "lenet5", "--workers", "2", "--json"]
    done = Started([*command, *QUICK], home, afresh=True).finish()  # as a user starts it
    assert done.code == 0, done.err
    path = home / "runs" / json.loads(done.out)["id"]
    assert json.loads((path / "result.json").read_text()) == json.loads(done.out)
    return path


def planned(result: dict, strategy: str) -> dict:
    (row,) = (row for row in result["plans"] if row["strategy"] == strategy)
    return row


@pytest.fixture(scope="module")
def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_a_run_writes_its_files_and_what_they_say_fits_together(result, folder):
    assert {path.name for path in folder.iterdir()} == {
        "result.json",
        "trace.json",
        "report.html",
        "model.safetensors",
        "run.toml",
    }
    assert result["samples_per_s"] == pytest.approx(1438 / 23 / result["step_s"])
    assert planned(result, "allreduce")["step_s"] == result["predicted_step_s"]
    assert result["accuracy"] == result["epochs"][-1]["score"]
    assert len(result["peak_memory_bytes"]) == 2


def test_the_measured_timeline_conforms_to_the_plan(result, folder):
    assert result["faults"] == []
    timelines = read_trace(folder / "trace.json")
    measured = timelines["measured"]
    assert measured.num_steps() == 20
    # 61,706 gradients fit in one bucket, which both ranks reduce together.
    reductions = [span for span in measured.spans if (span.step, span.kind) == (0, Kind.REDUCE)]
    assert [span.name for span in reductions] == ["s0/reduce[0]"]
    assert {resource.owner for resource in reductions[0].on} == {"cpu0", "cpu1"}


def test_the_trace_has_no_overlapping_slices_on_a_track(result, folder):
    events = json.loads((folder / "trace.json").read_text())
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events["traceEvents"]:
        if event["ph"] == "X":
            start, end = event["ts"], event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append((start, end))
    assert len(tracks) == 4 + 5  # lanes of two devices, measured; predicted, and the link
    for slices in tracks.values():
        slices.sort()
        nanosecond = 1e-3
        assert all(a[1] <= b[0] + nanosecond / 2 for a, b in pairwise(slices))


def test_the_same_run_works_under_torchrun_and_gives_the_same_losses(result, start):
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(*module, "-m", "paceline", "train", "lenet5", "--json", *QUICK).finish()
    assert done.code == 0, done.err
    other = json.loads(done.out)
    assert [row["train_loss"] for row in other["epochs"]] == [
        row["train_loss"] for row in result["epochs"]
    ]


def test_the_file_of_a_run_repeats_it(result, folder, paceline):
    done = paceline("train", "--config", str(folder / "run.toml"), "--json")
    assert done.code == 0, done.err
    again = json.loads(done.out)
    assert again["settings"] == result["settings"]
    rows = [[row["train_loss"] for row in one["epochs"]] for one in (again, result)]
    assert rows[0] == rows[1]


# Each rank of torchrun has settings of its own, as on machines with different files.
UNEQUAL = """
import os, sys
from paceline.cli import main

sys.argv[1:] = ["train", "lenet5", "--profile-s", "0.2", "--seed", os.environ["RANK"]]
main()
"""


def test_ranks_with_other_settings_are_refused_before_they_train(start, tmp_path):
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = start(*module, "unequal.py").finish()
    assert done.code == 1  # of torchrun
    why = "paceline: seed: 1 in worker 1, and 0 in worker 0; start all by the same command line"
    assert why in done.err.splitlines()
    assert not (tmp_path / "runs").exists()


def test_compare_and_report_work_on_the_files_alone(result, folder, paceline):
    done = paceline("compare", str(folder), "--json")
    again = json.loads(done.out)["rows"]
    for row, written in zip(again, result["comparison"]["rows"], strict=True):
        assert row["quantity"] == written["quantity"]
        for side in ("left_s", "right_s"):  # the trace counts nanoseconds
            assert row[side] == pytest.approx(written[side], abs=2e-9)
    report = folder / "report.html"
    report.unlink()
    assert paceline("report", str(folder)).code == 0
    assert report.exists()


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_takes_the_same_steps_as_two(paceline, result, workers: int):
    # 1,438 samples in 23 steps of 62 or 63: three ranks get unequal shares, weighted by their size.
    other = trained(paceline, "--workers", str(workers))
    for row, of_two in zip(other["epochs"], result["epochs"], strict=True):
        assert row["train_loss"] == pytest.approx(of_two["train_loss"], rel=1e-4)
        assert row["test_loss"] == pytest.approx(of_two["test_loss"], rel=1e-4)
    exchanged = planned(other, "allreduce")["wire_nbytes_per_step"]
    assert exchanged == pytest.approx(2 * (workers - 1) * 4 * 61_706)


def test_planning_here_profiles_and_trains_nothing(paceline, tmp_path):
    done = paceline("plan", "lenet5", "--json", "--profile-s", "0.2")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    rows = plan["plans"]
    assert [row["step_s"] for row in rows] == sorted(row["step_s"] for row in rows)
    # 61,706 float32 gradients: each of two ranks sends all of them through the host's link. By a
    # tree the gradients go one way and the parameters the other; the host's sum has no link.
    sent = {row["strategy"]: row["wire_nbytes_per_step"] for row in rows if row["workers"] == 2}
    assert {name: sent[name] for name in ("allreduce", "tree", "host")} == {
        "allreduce": 2 * 4 * 61_706,
        "tree": 2 * 4 * 61_706,
        "host": 0,
    }
    # With a split head only the body's 2,572 gradients travel, and activations of 64 samples.
    assert 2 * 4 * 2_572 < sent["subbatch"] < sent["allreduce"]
    assert plan["refused"] == []
    assert not (tmp_path / "runs").exists()
    # One worker has been measured, too, or nobody knows what the second one brings.
    [alone] = [row for row in rows if row["workers"] == 1]
    assert (alone["wire_nbytes_per_step"], alone["memory_nbytes"].keys()) == (0, {"cpu0"})
    assert "worth using" in plan["workers_sentence"]


def test_a_plan_here_of_a_hub_is_of_nothing_else(paceline):
    done = paceline("plan", "lenet5", "--strategy", "wheel", "--json", "--profile-s", "0.2")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert [(row["strategy"], row["workers"]) for row in plan["plans"]] == [("wheel", 2)]
    assert plan["refused"] == []


def test_a_plan_here_says_why_a_head_cannot_be_split(paceline):
    done = paceline("plan", "mlp-64-10", "--json", "--profile-s", "0.2")
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert {row["strategy"] for row in plan["plans"]} == {"allreduce", "tree", "host"}
    [refused] = plan["refused"]
    assert (refused["strategy"], refused["workers"]) == ("subbatch", 2)
    assert "mlp-64-10 has no head to split" in refused["why"]


def test_what_several_labels_are_scored_by_is_called_by_its_name(paceline, tmp_path):
    data = ("--data", "delicious-like:samples=300", "--workers", "1")
    done = paceline("train", "mlp-500-8-983", *data, *QUICK)
    assert done.code == 0, done.err
    assert ", precision@1 " in done.err
    assert "\nprecision@1 " in done.out
    assert "accuracy" not in done.out + done.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "result.json").read_text())["score"] == "precision@1"


def test_a_model_of_the_users_own(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))\n"
    )
    done = paceline("train", "mine:net", "--json", *QUICK)
    assert done.code == 0, done.err
    assert json.loads(done.out)["faults"] == []
