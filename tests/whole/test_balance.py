"""Whole runs of unequal batches."""

from pathlib import Path

import pytest

from refusals import refused_field

pytestmark = pytest.mark.slow
NET = """
from torch import nn
def net(num_classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), nn.ReLU(), {} nn.Linear(2000, 10))
"""
WIDE = "nn.Linear(2000, 2000), nn.ReLU(),"


def test_uneven_workers_are_rehearsed_with_batches_that_follow_their_speeds(outcome, tmp_path):
    (tmp_path / "mine.py").write_text(NET.format(""))
    options = ("--stretch", "1,8", "--strategy", "host", "--steps", "6", "--batch-size", "600")
    shape = ("--input-shape", "1x8x8", "--balance", "auto")
    result = outcome("rehearse", "mine:net", *options, *shape)
    assert result["settings"]["stretch"] == [1.0, 8.0]
    fast, slow = result["shares"]
    assert fast + slow == 600
    assert fast > slow  # other programs of the machine may slow one of the two down
    assert result["faults"] == []


def test_a_run_balances_its_batches_and_learns(outcome):
    options = ("--balance", "auto", "--force", "--epochs", "3", "--profile-s", "0.5")
    result = outcome("train", "lenet5", "--strategy", "host", *options)
    assert sum(result["shares"]) == result["settings"]["batch_size"] == 64
    assert result["accuracy"] > 0.8
    assert result["faults"] == []


def test_a_run_without_gain_is_refused(paceline, tmp_path: Path):
    """Of a model that computes four samples, and exchanges 17 MB."""
    (tmp_path / "mine.py").write_text(NET.format(WIDE))
    options = ("--epochs", "1", "--profile-s", "0.5", "--batch-size", "4", "--balance", "auto")
    done = paceline("train", "mine:net", *options)
    assert done.code == 2, done.out + done.err
    assert refused_field(done.err)
