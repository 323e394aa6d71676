"""Profiles with real workers, and attempts at batch sizes in child processes."""

import json
import sys
from pathlib import Path

import pytest

from paceline.record.trace import read_trace
from paceline.records.profile import ProfileResult, ProfileSettings
from paceline.studies.profile.largest_batch import Attempt, attempted, find_largest
from processes import Started, forking

MODELS = """
import os, signal, sys
import torch
from torch import nn

class Broad(nn.Linear):
    \"\"\"40 MB of features a sample.\"\"\"

    def forward(self, x):
        return super().forward(x).repeat(1, 1_000_000).sin().sum(1, keepdim=True).expand(-1, 10)

def broad():
    return Broad(64, 10)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def waiting():
    signal.pause()

def middling():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024),
                         nn.ReLU(), nn.Linear(1024, 10))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "models_of_profile.py").write_text(MODELS)
    return folder


def test_a_profile_measures_the_model_and_both_workers(home: Path) -> None:
    command = [sys.executable, "-m", "paceline", "profile", "models_of_profile:middling"]
    options = ["--data", "synthetic:64,samples=1024", "--batch-size", "256", "--workers", "2"]
    done = Started([*command, *options, "--steps", "8", "--json"], home).finish()
    assert done.code == 0, done.err
    result = ProfileResult.model_validate_json(done.out)
    folder = home / "runs" / result.id
    assert json.loads((folder / "result.json").read_text()) == json.loads(done.out)
    files = {"result.json", "trace.json", "report.html", "run.toml"}
    assert {path.name for path in folder.iterdir()} == files
    timeline = read_trace(folder / "trace.json")["measured"]
    assert timeline.num_steps() == 1 + 4  # the last block of recorded steps
    assert result.findings
    # The stages add up to the step.
    assert abs(result.stages_error) < 0.02
    stages = {row.stage: row.seconds for row in result.stages}
    assert stages["hidden"] + stages["exposed"] > 0
    assert min(stages.values()) >= 0
    assert {row.resource for row in result.resources} >= {"cpu0/compute", "cpu1/compute"}
    layers = {row.name: row.num_parameters for row in result.layers}
    assert layers == {"1": 66_560, "3": 1_049_600, "5": 10_250}
    assert all(0 < row.in_operators_s <= row.torch_s for row in result.agreement)
    assert min(row.ours_s for row in result.agreement) > 0
    assert "aten::addmm" in {row.name for row in result.operators}
    assert sum(row.share for row in result.operators) <= 1 + 1e-9
    assert result.memory.parameters == result.memory.gradients == 4 * sum(layers.values())
    assert abs(result.memory.error) < 0.1
    assert [row.worker for row in result.workers] == [0, 1]
    for row in result.workers:
        # Training adds gradients, momentum and buckets.
        assert row.training_nbytes - row.before_nbytes > 3 * result.memory.parameters


def settings(model: str, **values: object) -> ProfileSettings:
    return ProfileSettings(model=f"models_of_profile:{model}", data="synthetic:64", **values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "seconds", "named"), [("killed", 60, "SIGKILL"), ("waiting", 1, "1 s")]
)
def test_a_killed_or_hanging_attempt_is_reported_as_a_row(home, monkeypatch, model, seconds, named):
    monkeypatch.chdir(home)
    limits = {"limit_nbytes": 2**32, "deadline_s": seconds}
    row = attempted(Attempt(settings=settings(model), batch_size=4, **limits))
    assert (row.batch_size, row.fits) == (4, False)
    assert named in row.why


@pytest.mark.slow
def test_the_search_continues_after_out_of_memory(home, monkeypatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said: list[str] = []
    with forking():
        found = find_largest(settings("broad", largest_batch="1GiB"), said.append)
    assert found.complete
    assert len(said) == len(found.attempts)
    assert {row.why for row in found.attempts if not row.fits} == {"out of memory"}
    # A sample keeps 40 MB for backward, which needs twice as much; Python needs memory, too.
    assert 4 <= found.batch_size <= 2**30 / 80e6
    assert abs(found.batch_size - found.predicted) <= 4
