"""A strategy that the package has never heard of plans, trains, rehearses and reports."""

import shutil
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "toy_strategy.py"
TOY = ("--strategy", "toy_strategy:STRATEGY")
slow = pytest.mark.slow


@pytest.fixture
def toy(outcome, tmp_path: Path):
    """Run paceline where the module of the strategy can be imported."""
    shutil.copy(PROGRAM, tmp_path)
    return lambda *arguments: outcome(*arguments, *TOY)


def test_it_trains_as_its_plan_says_and_is_reported(toy, tmp_path: Path) -> None:
    quick = ("--epochs", "2", "--profile-s", "0.2")
    result = toy("train", "lenet5", "--set", "rounds=2", *quick)
    assert (result["strategy"], result["config"]) == ("toy", {"workers": 2, "rounds": 2})
    assert result["faults"] == []  # two exchanges a step, in the order of the plan
    assert result["accuracy"] > 0.5
    assert result["predicted_step_s"] > 0
    assert (tmp_path / "runs" / result["id"] / "report.html").exists()


@slow
def test_it_is_planned_on_a_machine_and_here_and_rehearsed(toy) -> None:
    there = toy("plan", "lenet5", "--machine", "k40-gigabit")
    assert {row["strategy"] for row in there["plans"]} == {"toy"}
    here = toy("plan", "lenet5", "--profile-s", "0.2")
    assert {"toy", "allreduce"} <= {row["strategy"] for row in here["plans"]}
    result = toy("rehearse", "lenet5", "--device", "k40-gigabit/gpu0", "--steps", "5")
    assert (result["origin"], result["strategy"]) == ("rehearsed", "toy")
    assert result["faults"] == []
