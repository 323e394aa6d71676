"""Whole runs with unequal batches, and with one worker that exchanges with itself."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from findings import numbers

pytestmark = pytest.mark.slow
NET = """
from torch import nn
def net(num_classes=10):
    layers = nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 10)
    return nn.Sequential(nn.Flatten(), *layers)
"""


def test_a_run_balances_its_batches_and_learns(outcome):
    options = ("--balance", "auto", "--keep-all", "--epochs", "3", "--profile-s", "0.5")
    result = outcome("train", "lenet5", "--strategy", "host", *options)
    assert sum(result["shares"]) == result["settings"]["batch_size"] == 64
    assert result["accuracy"] > 0.8
    assert result["faults"] == []


def test_a_run_continues_with_one_worker_if_a_second_costs_time(outcome, tmp_path: Path):
    """Each step computes four samples and exchanges 17 MB."""
    (tmp_path / "mine.py").write_text(NET)
    options = ("--epochs", "1", "--profile-s", "0.5", "--batch-size", "4", "--balance", "auto")
    result = outcome("train", "mine:net", *options)
    (reason,) = result["decisions"]
    lone, _, num_workers, *_ = numbers(reason)
    assert (lone, num_workers) == (0, 2)
    assert result["settings"]["workers"] == 1
    assert result["faults"] == []


# One worker

ASKED = ("lenet5", "--data", "synthetic:samples=80,classes=4", "--batch-size", "8", "--epochs", "1")
QUICK = ("--workers", "1", "--profile-s", "0.2", "--seed", "3")


@pytest.mark.parametrize("strategy", ["allreduce", "host", "tree"])
def test_one_worker_trains_with_an_exchange_as_without(outcome, tmp_path, strategy):
    """Compare the weights bit for bit."""
    asked = ("train", *ASKED, *QUICK, "--strategy", strategy)
    found = [outcome(*asked, *more) for more in ((), ("--strategy-option", "exchange_alone=true"))]
    assert found[1]["faults"] == []
    weights = [load_file(tmp_path / "runs" / one["id"] / "model.safetensors") for one in found]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    spent = [
        {row["quantity"]: row["right_s"] for row in one["comparison"]["rows"]} for one in found
    ]
    assert spent[0]["exposed"] + spent[0]["hidden"] == 0
    # A tree of one worker sends nothing; it only fills its buffer.
    assert (spent[1]["exposed"] + spent[1]["hidden"] > 0) == (strategy != "tree")


def test_an_overhead_study_measures_the_exchange_of_one_worker(outcome):
    """Each method exchanges with itself, as in Table II."""
    asked = ("scale", "lenet5", "--workers", "1", "--batch-size", "8")
    asked += ("--strategy", "allreduce,host")
    quick = ("--steps", "5", "--repeats", "1", "--profile-s", "0.2", "--output", "study")
    for cell in outcome(*asked, "--overhead", *quick)["cells"]:
        assert cell["error"] is None
        assert cell["exposed_s"] + cell["hidden_s"] > 0
