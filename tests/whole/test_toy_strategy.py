"""A strategy that the package has never heard of plans, trains, rehearses and reports."""

import json
import shutil
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "toy_strategy.py"
TOY = ("--strategy", "toy_strategy:STRATEGY")


@pytest.fixture
def toy(paceline, tmp_path):
    """Run paceline where the module of the strategy can be imported."""
    shutil.copy(PROGRAM, tmp_path)

    def run(*arguments: str) -> dict:
        done = paceline(*arguments, *TOY, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return run


def test_it_is_planned_on_a_machine_and_here(toy):
    there = toy("plan", "lenet5", "--machine", "k40-gigabit")
    assert {row["strategy"] for row in there["plans"]} == {"toy"}
    here = toy("plan", "lenet5", "--profile-s", "0.2")
    assert {"toy", "allreduce"} <= {row["strategy"] for row in here["plans"]}


def test_it_trains_as_its_plan_says_and_is_reported(toy, tmp_path):
    quick = ("--epochs", "2", "--profile-s", "0.2")
    result = toy("train", "lenet5", "--set", "rounds=2", *quick)
    assert (result["strategy"], result["config"]) == ("toy", {"workers": 2, "rounds": 2})
    assert result["faults"] == []  # two exchanges a step, in the order of the plan
    assert result["accuracy"] > 0.5
    assert result["predicted_step_s"] > 0
    report = (tmp_path / "runs" / result["id"] / "report.html").read_text()
    assert "strategy toy" in report


def test_it_is_rehearsed_by_the_same_runner(toy):
    result = toy("rehearse", "lenet5", "--device", "k40-gigabit/gpu0", "--steps", "5")
    assert (result["origin"], result["strategy"]) == ("rehearsed", "toy")
    assert result["faults"] == []


def test_what_it_does_not_understand_is_refused(paceline, tmp_path):
    shutil.copy(PROGRAM, tmp_path)
    done = paceline("train", "lenet5", *TOY, "--balance", "auto")
    assert done.code == 2
    assert "balance: goes not with strategy toy" in done.err
    done = paceline("train", "lenet5", "--strategy", "toy_strategy:plan")
    assert done.code == 2
    assert "is a function, not a Strategy" in done.err
