"""Whole commands with strategy local: training, rehearsals, unequal workers."""

import shutil
from pathlib import Path

import pytest

from paceline.record.trace import read_trace
from refusals import refused_field

RECIPES = Path(__file__).parents[1] / "small_recipes.py"
QUICK = ("--profile-s", "0.2", "--batch-size", "24", "--epochs", "4")
TRAIN = ("train", "small_recipes:with_dropout", "--strategy", "local", *QUICK, "--workers", "2")


@pytest.fixture(autouse=True)
def recipes(tmp_path: Path) -> None:
    shutil.copy(RECIPES, tmp_path)


def test_a_run_from_the_command_line(outcome, tmp_path: Path) -> None:
    options = ("sync_every=8", "fragments=2", "delay=2")
    own = [word for option in options for word in ("--strategy-option", option)]
    result = outcome(*TRAIN, *own, "--codec", "dynamic4")
    assert result["faults"] == []
    assert [one["number"] for one in result["epochs"]] == [0, 1, 2, 3]
    assert result["epochs"][-1]["test_loss"] < result["epochs"][0]["test_loss"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "model.safetensors").exists()


PACE = (
    *("--device", "p100", "--forward-ms", "4", "--backward-ms", "8", "--update-ms", "1"),
    *("--steps", "24"),
)
REHEARSE = ("rehearse", "lenet5", "--strategy", "local", "--profile-s", "0.2")


@pytest.mark.slow
def test_a_rehearsal_takes_the_devices_times_and_conforms_to_the_plan(outcome, tmp_path):
    options = ("sync_every=12", "fragments=2", "delay=2", "codec=threshold:0.001@0.1")
    own = [word for option in options for word in ("--strategy-option", option)]
    result = outcome(*REHEARSE, *PACE, *own)
    assert (result["origin"], result["faults"], result["epochs"]) == ("rehearsed", [], [])
    assert result["step_s"] >= 0.99 * 0.013
    (folder,) = (tmp_path / "runs").iterdir()
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    assert not (folder / "model.safetensors").exists()
    assert result["sent_share"]["measured"] == pytest.approx(0.1, rel=1e-3)
    assert result["sent_share"]["warning"] is None


@pytest.mark.slow
def test_a_worker_that_is_four_times_as_fast_gets_more_samples(outcome) -> None:
    asked = ("--slowdown", "1,4", "--balance", "auto", "--steps", "60", "--profile-s", "1")
    fast, slow = outcome(*REHEARSE, *asked, "--strategy-option", "sync_every=20")["shares"]
    assert fast + slow == 64
    # The layers' times differ by a factor of 4; other processes may slow down one worker.
    assert fast > 1.5 * slow


def test_rounds_that_are_longer_than_the_run_are_refused(paceline) -> None:
    done = paceline(*TRAIN, "--strategy-option", "sync_every=999")
    assert (done.code, refused_field(done.err)) == (2, "sync_every")
