"""Whole rehearsals with real worker processes: real exchange, paced or stretched layers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.core.plan import Kind
from paceline.record.trace import read_trace
from processes import Finished, Started

PACE = ("--forward-ms", "10", "--backward-ms", "20", "--update-ms", "2", "--steps", "4")
SEARCH = ("--chunk-search", "runtime", "--search-step", "2", "--search-range", "1")
LEAST_S = {"forward": 0.010, "backward": 0.020, "update": 0.002}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Finished, Path]:
    """A rehearsal of strategy host, with a search, for all tests that look at what it wrote."""
    home = tmp_path_factory.mktemp("rehearsal")
    options = ("--strategy", "host", *PACE, *SEARCH, "--interval", "3")
    command = [sys.executable, "-m", "paceline", "rehearse", "lenet5", "--device", "p100"]
    done = Started([*command, *options], home).finish()
    assert done.code == 0, done.err
    (folder,) = (home / "runs").iterdir()
    return done, folder


def check_result(result: dict[str, Any], strategy: str) -> None:
    """Check what holds of every paced rehearsal of LeNet-5: layers take at least their times."""
    assert (result["origin"], result["devices"]) == ("rehearsed", "paced as power8-p100/gpu0")
    assert (result["settings"]["strategy"], result["plans"][0]["strategy"]) == (strategy, strategy)
    assert result["faults"] == []
    comparison = result["comparison"]
    assert (comparison["left"], comparison["right"]) == ("predicted", "rehearsed")
    rows = {row["quantity"]: row for row in comparison["rows"]}
    # Of strategy tree only one of the two workers updates; rows are means over both.
    shares = {"update": 0.5 if strategy == "tree" else 1.0, "forward": 1.0}
    for quantity, share in shares.items():
        # The profile of all phases is scaled to that of an untraced step.
        assert rows[quantity]["left_s"] > 0.8 * share * LEAST_S[quantity]
        assert rows[quantity]["right_s"] >= share * LEAST_S[quantity] - 1e-6
    least_s = sum(LEAST_S.values())
    assert rows["step"]["right_s"] > least_s
    assert result["predicted_step_s"] > least_s
    quartiles = result["lower_quartile_s"], result["upper_quartile_s"]
    assert least_s < quartiles[0] <= result["step_s"] <= quartiles[1]
    assert result["samples_per_s"] == pytest.approx(64 / result["step_s"])
    assert len(result["peak_memory_bytes"]) == 2


def test_a_rehearsal_is_called_one_everywhere(run) -> None:
    done, folder = run
    assert "rehearsed" in folder.name
    files = {"result.json", "trace.json", "report.html", "run.toml"}
    assert {path.name for path in folder.iterdir()} == files
    page = (folder / "report.html").read_text()
    for text in (done.out, page):
        assert "rehearsed" in text
        assert "power8-p100/gpu0" in text
    assert "measured" not in done.out
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    check_result(json.loads((folder / "result.json").read_text()), "host")


def test_the_search_tries_chunks_while_it_is_rehearsed(run) -> None:
    _, folder = run
    result = json.loads((folder / "result.json").read_text())
    trials = {row["chunk"]: row for row in result["trials"]}
    # Algorithm 1 with step 2 and range 1: 1, 2, and then 4, whichever is best, is too far.
    assert list(trials) == [1, 2]
    assert result["config"]["chunk"] == min(trials, key=lambda size: trials[size]["rehearsed_s"])
    assert all(row["predicted_s"] > sum(LEAST_S.values()) for row in trials.values())
    num_sums = 5 if result["config"]["chunk"] == 1 else 3  # of five layers
    for timeline in read_trace(folder / "trace.json").values():
        sums = {span.part for span in timeline.spans if (span.step, span.kind) == (1, Kind.REDUCE)}
        assert len(sums) == num_sums


@slow
def test_a_rank_of_torchrun_rehearses_the_tree(start) -> None:
    options = ("--device", "p100", "--strategy", "tree", *PACE, "--json")
    done = start(*TORCHRUN, "-m", "paceline", "rehearse", "lenet5", *options).finish()
    assert done.code == 0, done.err
    check_result(json.loads(done.out), "tree")


@slow
def test_stretched_layers_are_computed_here(outcome) -> None:
    options = ("--stretch", "3", "--strategy", "host", "--steps", "4", "--json")
    result = outcome("rehearse", "lenet5", *options)
    assert (result["origin"], result["devices"]) == ("rehearsed", "stretched 3 times")
    assert result["faults"] == []


SHARE = 0.05
DECLARED = f"threshold:0.001@{SHARE}"


@slow
@pytest.mark.parametrize(
    ("strategy", "field", "within"),
    [
        ("allreduce", "codec", 8 / 61_706),  # of each of two shards of LeNet-5, to a value
        ("subbatch", "gradients", 0.05 * SHARE),
    ],
)
def test_a_rehearsal_sends_the_declared_share(outcome, strategy, field, within) -> None:
    own = ("--set", f"{field}={DECLARED}", "--strategy", strategy, *PACE, "--profile-s", "0.3")
    result = outcome("rehearse", "lenet5", "--device", "p100", *own)
    assert result["faults"] == []
    share = result["sent_share"]
    assert (share["codec"], share["declared"], share["warning"]) == (DECLARED, SHARE, None)
    assert share["measured"] == pytest.approx(SHARE, abs=within)


@slow
@pytest.mark.parametrize(("strategy", "field"), [("allreduce", "codec"), ("wheel", "gradients")])
def test_a_training_warns_if_the_declared_share_is_wrong(outcome, strategy, field) -> None:
    own = ("--strategy", strategy, "--set", f"{field}={DECLARED}", "--profile-s", "0.3")
    share = outcome("train", "lenet5", *own, "--epochs", "1")["sent_share"]
    assert DECLARED in share["warning"]
    # A network that has learnt little has gradients above a thousandth almost everywhere.
    assert share["measured"] > 0.2
