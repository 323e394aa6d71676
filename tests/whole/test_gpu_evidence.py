"""Test `make gpu-evidence`: all parts on simulated GPUs, and parts that fail or hang."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu import supervise
from processes import has_ended

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu"
PARTS = ("sums", "hidden", "beside", "codecs", "hogbatch", "predicted")
pytestmark = pytest.mark.slow
FAILING = """
def run(part):
    part.keep("a", {"b": 1}, "one")
    raise ValueError("no such thing")
"""
# This part starts a process in another session and hangs. It ignores SIGTERM, and its figure is
# both process ids.
HANGING = """
import os, signal, subprocess, sys

def run(part):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    beside = subprocess.Popen(command, start_new_session=True)
    part.keep("a", [os.getpid(), beside.pid], "one")
    signal.pause()
"""


@pytest.fixture(autouse=True)
def simulated(monkeypatch) -> None:
    """Give commands a simulated GPU."""
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")


def seconds_in(figures: Any) -> Iterator[float]:
    """Yield all medians of seconds."""
    for name, value in figures.items() if isinstance(figures, dict) else ():
        if name == "seconds" and isinstance(value, dict):
            yield value["median"]
        else:
            yield from seconds_in(value)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_a_simulated_gpu(start, tmp_path, part: str):
    done = start(str(GPU / "main.py"), "out", part, "--smoke", afresh=True).finish()
    assert done.code == 0, done.out + done.err
    content = json.loads((tmp_path / "out" / f"{part}.json").read_text())
    assert (content["part"], content["outcome"], content["why"]) == (part, "done", None)
    assert content["simulated"]
    assert content["figures"]
    assert all(one > 0 for one in seconds_in(content["figures"]))
    summary = (tmp_path / "out" / "README.md").read_text()
    assert summary in done.out
    assert all(line in summary for line in content["summary"].values())


def test_two_ranks_are_measured_on_one_gpu_and_on_two(start, tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "2")
    done = start(str(GPU / "main.py"), "out", "sums", "--smoke").finish()
    assert done.code == 0, done.out + done.err
    figures = json.loads((tmp_path / "out" / "sums.json").read_text())["figures"]
    assert [name.partition("float32, ")[2] for name in figures] == [
        "2 ranks on one GPU",
        "2 ranks, a GPU each",
    ]


@pytest.fixture
def own_parts(tmp_path: Path, monkeypatch) -> Path:
    """Write two test parts as importable modules; return the folder for their results."""
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "hanging.py").write_text(HANGING)
    instead = ROOT / "tests" / "simulated_gpu" / "children"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{instead}")
    return tmp_path


def test_a_failed_part_keeps_its_figures_and_the_reason(own_parts):
    path = own_parts / "failing.json"
    assert not supervise.run(path, "failing", 600.0, smoke=True)
    content = json.loads(path.read_text())
    assert (content["outcome"], content["figures"]) == ("failed", {"a": {"b": 1}})
    assert content["why"] == "ValueError: no such thing"
    assert "a: one<br>ValueError: no such thing |" in supervise.summary(own_parts, ["failing"])


def test_a_hanging_part_is_ended_at_its_deadline_and_leaves_no_process(own_parts):
    path, deadline_s, found = own_parts / "hanging.json", 4.0, {}
    while not found:  # on a busy machine, the deadline may precede the figure
        deadline_s *= 2
        assert not supervise.run(path, "hanging", deadline_s, smoke=True)
        content = json.loads(path.read_text())
        assert content["outcome"] == "ended at its deadline"
        found = content.get("figures", {})
    assert all(map(has_ended, found["a"]))
