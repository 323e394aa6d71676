"""The user-defined strategy of the guide plans, trains and rehearses."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "own-strategy.md"
OWN = ("--strategy", "mean_strategy:STRATEGY")
slow = pytest.mark.slow


@pytest.fixture
def own(outcome, tmp_path: Path):
    """Run paceline with the guide's strategy in the current folder."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "mean_strategy.py").write_text(code)
    return lambda *arguments: outcome(*arguments, *OWN)


def test_it_trains_conforms_to_its_plan_and_is_reported(own, tmp_path: Path) -> None:
    result = own("train", "lenet5", "--epochs", "2", "--profile-s", "0.2")
    assert (result["strategy"], result["config"]) == ("mean", {"workers": 2})
    assert result["faults"] == []
    assert result["accuracy"] > 0.5
    assert result["predicted_step_s"] > 0
    assert (tmp_path / "runs" / result["id"] / "report.html").exists()


def test_it_is_planned_on_a_machine(own) -> None:
    rows = own("plan", "lenet5", "--machine", "k40-gigabit")["plans"]
    assert {row["strategy"] for row in rows} == {"mean"}
    assert {1, 2} <= {row["workers"] for row in rows}


@slow
def test_it_is_planned_here_and_rehearsed(own) -> None:
    here = own("plan", "lenet5", "--profile-s", "0.2")
    assert {"mean", "allreduce"} <= {row["strategy"] for row in here["plans"]}
    result = own("rehearse", "lenet5", "--device", "k40-gigabit/gpu0", "--steps", "5")
    assert (result["origin"], result["strategy"]) == ("rehearsed", "mean")
    assert result["faults"] == []
