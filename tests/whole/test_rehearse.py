"""Whole rehearsals with worker processes: a real exchange, and paced or stretched layers."""

import json
from pathlib import Path

import pytest

from paceline.core.plan import Kind
from paceline.record.trace import read_trace

PACE = ("--forward-ms", "10", "--backward-ms", "20", "--update-ms", "2", "--steps", "4")
SEARCH = (
    *("--strategy-option", "chunk=search", "--strategy-option", "search_step=2"),
    *("--strategy-option", "search_range=1"),
)
LEAST_S = {"forward": 0.010, "backward": 0.020, "update": 0.002}
slow = pytest.mark.slow


def test_a_rehearsal_with_a_chunk_search_is_labelled_everywhere(paceline, tmp_path: Path) -> None:
    options = ("--strategy", "host", *PACE, *SEARCH, "--strategy-option", "interval=3")
    done = paceline("rehearse", "lenet5", "--device", "p100", *options)
    assert done.code == 0, done.err
    (folder,) = (tmp_path / "runs").iterdir()
    assert "rehearsed" in folder.name
    files = {"result.json", "trace.json", "report.html", "run.toml"}
    assert {path.name for path in folder.iterdir()} == files
    for text in (done.out, (folder / "report.html").read_text()):
        assert "rehearsed" in text
        assert "power8-p100/gpu0" in text
    assert "measured" not in done.out
    result = json.loads((folder / "result.json").read_text())
    assert (result["origin"], result["devices"]) == ("rehearsed", "paced as power8-p100/gpu0")
    assert result["settings"]["strategy"] == result["plans"][0]["strategy"] == "host"
    assert result["faults"] == []
    comparison = result["comparison"]
    assert (comparison["left"], comparison["right"]) == ("predicted", "rehearsed")
    # Paced layers take at least the given times.
    rows = {row["quantity"]: row for row in comparison["rows"]}
    for quantity in ("update", "forward"):
        # The profile scales all phases to the time of an untraced step.
        assert rows[quantity]["left_s"] > 0.8 * LEAST_S[quantity]
        assert rows[quantity]["right_s"] >= LEAST_S[quantity] - 1e-6
    least_s = sum(LEAST_S.values())
    assert min(rows["step"]["right_s"], result["predicted_step_s"]) > least_s
    assert least_s < result["lower_quartile_s"] <= result["step_s"] <= result["upper_quartile_s"]
    assert len(result["peak_memory_bytes"]) == 2
    # Algorithm 1 with step 2 and range 1 tries 1 and 2; 4 is out of range of either.
    trials = {row["chunk"]: row for row in result["trials"]}
    assert list(trials) == [1, 2]
    assert result["config"]["chunk"] == min(trials, key=lambda size: trials[size]["rehearsed_s"])
    assert all(row["predicted_s"] > least_s for row in trials.values())
    num_sums = 5 if result["config"]["chunk"] == 1 else 3  # LeNet-5 has five layers
    timelines = read_trace(folder / "trace.json")
    assert set(timelines) == {"predicted", "rehearsed"}
    for timeline in timelines.values():
        sums = {span.part for span in timeline.spans if (span.step, span.kind) == (1, Kind.REDUCE)}
        assert len(sums) == num_sums


SHARE = 0.05
DECLARED = f"threshold:0.001@{SHARE}"


@slow
@pytest.mark.parametrize(
    ("strategy", "field", "within"),
    [
        ("allreduce", "codec", 8 / 61_706),  # rounding to whole values of each shard
        ("subbatch", "gradients", 0.05 * SHARE),
    ],
)
def test_a_rehearsal_sends_the_declared_share(outcome, strategy, field, within) -> None:
    own = ("--strategy", strategy, "--strategy-option", f"{field}={DECLARED}", "--profile-s", "0.3")
    result = outcome("rehearse", "lenet5", "--device", "p100", *PACE, *own)
    assert result["faults"] == []
    share = result["sent_share"]
    assert (share["codec"], share["declared"], share["warning"]) == (DECLARED, SHARE, None)
    assert share["measured"] == pytest.approx(SHARE, abs=within)
