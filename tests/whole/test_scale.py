"""Scaling studies with real runs: interrupted, killed, and with a model that crashes."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from faults import Pause, failpoints
from scale_cells import model_source

QUICK = ("--steps", "5", "--profile-s", "0.2", "--repeats", "1", "--batch-size", "8")
CRASHING = model_source("Crashing", "if not x.is_meta: os._exit(7)", "return self.layer(x)")


def cells_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "cells.jsonl").read_text().splitlines()]


def test_a_study_has_measured_rehearsed_and_predicted_cells(paceline, tmp_path: Path) -> None:
    asked = ("--strategy", "tree", "--workers", "2", "--device", "v100", "--output", "study")
    kinds = ("--kind", "measured,rehearsed,predicted")
    done = paceline("scale", "lenet5", *QUICK, *asked, *kinds, "--json")
    assert done.code == 0, done.err
    files = {path.name for path in (tmp_path / "study").iterdir()}
    assert files == {"study.json", "cells.jsonl", "result.json", "report.html", "run.toml"}
    result = json.loads(done.out)
    assert json.loads((tmp_path / "study" / "result.json").read_text()) == result
    assert len(cells_of(tmp_path / "study")) == len(result["cells"])
    cells = {one["kind"]: one for one in result["cells"]}
    assert list(cells) == ["measured", "rehearsed", "predicted"]
    for one in cells.values():
        assert one["error"] is None
        parts = ("forward_s", "backward_s", "exposed_s", "update_s", "idle_s")
        assert 0 < sum(one[part] for part in parts) <= one["epoch_s"] * (1 + 1e-9)
        assert one["exposed_s"] > 0
    # Runs measure the memory of the whole process; a prediction is of the replica only.
    assert cells["measured"]["memory_bytes"] > 2**26 > cells["predicted"]["memory_bytes"]
    assert cells["rehearsed"]["capacity_bytes"] > 15e9  # the V100's memory, not this machine's
    lines = [line for line in done.err.splitlines() if line[1:3] == "/2"]
    assert [line[:3] for line in lines] == ["1/2", "2/2"]


@pytest.mark.slow
def test_a_crash_in_one_cell_does_not_end_the_study(outcome, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CRASHING)
    crashed, well = outcome(
        *("scale", "own:Crashing", "--input-shape", "4", "--strategy", "tree", "--workers", "1"),
        *("--kind", "measured,predicted", "--machine", "two-core-epyc", *QUICK),
    )["cells"]
    assert "7" in crashed["error"]
    assert crashed["epoch_s"] is None
    assert (well["kind"], well["error"]) == ("predicted", None)
    assert not list(tmp_path.glob("runs/*/under-way-*"))


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_study_keeps_its_cells_and_resumes(start, tmp_path: Path, by: int) -> None:
    # The first cell fails at once, because two workers cannot share one sample.
    command = ("-m", "paceline", "scale", "lenet5", *QUICK[:-2], "--batch-size", "1", "--json")
    command += ("--workers", "2,1", "--strategy", "tree", "--output", "study")
    pause = Pause(tmp_path / "pause")
    with failpoints(pause.at("rank.started")):
        study = start(*command)
    pause.reached()
    study.process.send_signal(by)
    study.process.wait()
    assert not study.members()
    (kept,) = cells_of(tmp_path / "study")
    assert kept["error"]
    if by == signal.SIGKILL:
        return
    assert not list((tmp_path / "study").glob("under-way-*"))
    again = start(*command).finish()
    assert again.code == 0, again.err
    first, second = json.loads(again.out)["cells"]
    assert first == kept
    assert (second["workers"], second["error"]) == (1, None)
