"""Studies whose cells are real runs: resumed, interrupted, killed, and with models that crash."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from processes import Started
from scale_cells import model_source

pytestmark = pytest.mark.slow

QUICK = ("--steps", "5", "--profile-s", "0.2", "--repeats", "1", "--batch-size", "8")
CRASHING = model_source("Crashing", "if not x.is_meta: os._exit(7)", "return self.layer(x)")


def wait_for(condition, deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def cells_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    home = tmp_path_factory.mktemp("study")
    command = [sys.executable, "-m", "paceline", "scale", "lenet5", *QUICK, "--json"]
    asked = ["--strategy", "tree", "--workers", "2", "--measure", "--device", "v100", "--predict"]
    started = Started([*command, *asked, "--output", "study"], home)
    try:
        done = started.finish(200)
        assert done.code == 0, done.err
        assert not started.members()
    finally:
        started.kill()
    files = {path.name for path in (home / "study").iterdir()}
    assert files == {"study.json", "cells.jsonl", "result.json", "report.html", "run.toml"}
    result = json.loads(done.out)
    assert json.loads((home / "study" / "result.json").read_text()) == result
    assert len(cells_of(home / "study")) == len(result["cells"])
    return result | {"progress": done.err}


def test_all_kinds_of_cells_stand_side_by_side(found):
    cells = {one["kind"]: one for one in found["cells"]}
    assert list(cells) == ["measured", "rehearsed", "predicted"]
    for one in cells.values():
        assert one["error"] is None
        parts = ("forward_s", "backward_s", "exposed_s", "update_s", "idle_s")
        assert 0 < sum(one[part] for part in parts) <= one["epoch_s"] * (1 + 1e-9)
        assert one["exposed_s"] > 0
    # What runs measure is the whole process; what is predicted, the replica.
    assert cells["measured"]["memory_bytes"] > 2**26 > cells["predicted"]["memory_bytes"]
    assert cells["rehearsed"]["capacity_bytes"] > 15e9  # the V100's, and no part of this machine's


def test_each_run_that_ends_says_so_and_what_is_left(found):
    first, second = (line for line in found["progress"].splitlines() if line[1:3] == "/2")
    assert first.startswith("1/2: train tree, 2 workers, 8: ")
    assert first.endswith(" left")
    assert second.startswith("2/2: rehearse tree, 2 workers, 8: ")
    assert "left" not in second


def test_a_crash_in_one_cell_is_a_row_and_not_the_end(paceline, tmp_path):
    (tmp_path / "own.py").write_text(CRASHING)
    done = paceline(
        *("scale", "own:Crashing", "--input-shape", "4", "--strategy", "tree", "--workers", "1"),
        *("--measure", "--predict", "--machine", "two-core-epyc", *QUICK, "--json"),
    )
    assert done.code == 0, done.err
    crashed, well = json.loads(done.out)["cells"]
    assert "exit code 7" in crashed["error"]
    assert crashed["epoch_s"] is None
    assert (well["kind"], well["error"]) == ("predicted", None)
    assert not list(tmp_path.glob("runs/*/under-way-*"))


def test_a_run_that_is_not_done_in_time_is_a_row_and_ended(paceline):
    done = paceline(
        *("scale", "lenet5", *QUICK, "--workers", "1", "--strategy", "tree", "--deadline-s", "0.1")
    )
    assert done.code == 2
    assert "was not done after 0.1 s, the deadline" in done.err


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_study_keeps_its_cells_and_goes_on(start, tmp_path, by):
    # The first cell fails at once: one sample cannot be shared.
    command = ("-m", "paceline", "scale", "lenet5", *QUICK[:-2], "--batch-size", "1", "--json")
    command += ("--workers", "2,1", "--strategy", "tree", "--output", "study")
    study = start(*command)
    wait_for(study.workers)
    study.process.send_signal(by)
    study.process.wait(600)
    wait_for(lambda: not study.members(), 600)
    (kept,) = cells_of(tmp_path / "study")
    assert kept["error"] == "a batch of 1 cannot be shared by 2 workers"
    if by == signal.SIGKILL:
        return
    assert not list((tmp_path / "study").glob("under-way-*"))
    again = start(*command).finish()
    assert again.code == 0, again.err
    assert "1 cell kept from before" in again.err
    first, second = json.loads(again.out)["cells"]
    assert first == kept
    assert (second["workers"], second["error"]) == (1, None)
