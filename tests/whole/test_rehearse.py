"""Whole rehearsals with real worker processes: real exchange, paced or stretched layers."""

import json
import sys
from pathlib import Path

import pytest

from paceline.core.plan import Kind
from paceline.record.trace import read_trace
from processes import Finished, Started

pytestmark = pytest.mark.slow

PACE = ("--forward-ms", "10", "--backward-ms", "20", "--update-ms", "2", "--steps", "4")
SEARCH = ("--chunk-search", "runtime", "--search-step", "2", "--search-range", "1")
LEAST_S = {"forward": 0.010, "backward": 0.020, "update": 0.002}

PROGRAM = """
import json
import paceline

done = paceline.rehearse(
    "lenet5", device="p100", forward_ms=10, backward_ms=20, update_ms=2, steps=4, workers=2
)
print(json.dumps({
    "result": json.loads(done.result.model_dump_json()),
    "origin": done.timeline.origin,
    "report": done.report("mine.html").name,
}))
"""


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


def check_result(result: dict, strategy: str) -> None:
    """Check what holds of every paced rehearsal of LeNet-5 with the times of PACE."""
    assert result["origin"] == "rehearsed"
    assert result["devices"] == "paced as power8-p100/gpu0"
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
    assert rows["step"]["right_s"] > sum(LEAST_S.values())
    assert result["predicted_step_s"] > sum(LEAST_S.values())
    quartiles = result["lower_quartile_s"], result["upper_quartile_s"]
    assert sum(LEAST_S.values()) < quartiles[0] <= result["step_s"] <= quartiles[1]
    assert result["samples_per_s"] == pytest.approx(64 / result["step_s"])
    assert len(result["peak_memory_bytes"]) == 2


def test_a_rehearsal_says_that_it_is_one_everywhere(run):
    done, folder = run
    assert "rehearsed" in folder.name
    files = {"result.json", "trace.json", "report.html", "run.toml"}
    assert {path.name for path in folder.iterdir()} == files
    assert "rehearsed  no training: 2 workers paced as power8-p100/gpu0" in done.out
    assert "measured" not in done.out
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    page = (folder / "report.html").read_text()
    assert "rehearsed, not trained: paced as power8-p100/gpu0" in page
    assert "rehearsal 2" in page  # the title
    check_result(json.loads((folder / "result.json").read_text()), "host")


def test_the_search_tries_chunks_while_it_is_rehearsed_and_prints_them(run):
    done, folder = run
    result = json.loads((folder / "result.json").read_text())
    trials = {row["chunk"]: row for row in result["trials"]}
    # Algorithm 1 with step 2 and range 1: 1, 2, and then 4, whichever is best, is too far.
    assert list(trials) == [1, 2]
    assert result["config"]["chunk"] == min(trials, key=lambda size: trials[size]["rehearsed_s"])
    assert all(row["predicted_s"] > sum(LEAST_S.values()) for row in trials.values())
    table = done.out[done.out.index("Chunk sizes tried") : done.out.index("Seconds per step,")]
    assert "predicted" in table
    assert "rehearsed" in table
    assert table.count("chosen") == 1
    timelines = read_trace(folder / "trace.json").values()
    num_sums = 5 if result["config"]["chunk"] == 1 else 3  # of five layers
    for timeline in timelines:
        sums = {span.part for span in timeline.spans if (span.step, span.kind) == (1, Kind.REDUCE)}
        assert len(sums) == num_sums


def test_a_rehearsal_can_be_compared_and_reported_anew(run, paceline):
    _, folder = run
    table = json.loads(paceline("compare", str(folder), "--json").out)
    assert (table["left"], table["right"]) == ("predicted", "rehearsed")
    report = folder / "report.html"
    before = report.read_text()
    report.unlink()
    assert paceline("report", str(folder)).code == 0
    assert report.read_text() == before


def test_a_rank_of_torchrun_rehearses_the_tree(start):
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--device", "p100", "--strategy", "tree", *PACE, "--json")
    done = start(*module, "-m", "paceline", "rehearse", "lenet5", *options).finish()
    assert done.code == 0, done.err
    check_result(json.loads(done.out), "tree")


def test_a_program_rehearses(start, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = start("program.py").finish()
    assert done.code == 0, done.err
    said = json.loads(done.out)
    check_result(said["result"], "allreduce")
    assert (said["origin"], said["report"]) == ("rehearsed", "mine.html")


def test_stretched_layers_are_computed_here(paceline, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5))\n"
    )
    options = ("--stretch", "3", "--strategy", "host", "--steps", "4", "--input-shape", "1x8x8")
    done = paceline("rehearse", "mine:net", *options, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["origin"], result["devices"]) == ("rehearsed", "stretched 3 times")
    assert result["faults"] == []


SHARE = 0.05
DECLARED = f"threshold:0.001@{SHARE}"
VALUES = 61_706  # of LeNet-5


def test_a_rehearsal_of_allreduce_sends_the_declared_share(paceline):
    own = ("--set", f"codec={DECLARED}", "--strategy", "allreduce", *PACE, "--profile-s", "0.3")
    done = paceline("rehearse", "lenet5", "--device", "p100", *own, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    check_result(result, "allreduce")
    share = result["sent_share"]
    assert (share["codec"], share["declared"], share["warning"]) == (DECLARED, SHARE, None)
    # Of each of two shards of a bucket, to a value.
    assert share["measured"] == pytest.approx(SHARE, abs=8 / VALUES)


def test_a_rehearsal_of_subbatch_sends_the_declared_share(paceline):
    own = ("--set", f"gradients={DECLARED}", "--strategy", "subbatch", *PACE)
    done = paceline("rehearse", "lenet5", "--device", "p100", *own, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["faults"] == []
    assert result["sent_share"]["warning"] is None
    assert result["sent_share"]["measured"] == pytest.approx(SHARE, rel=0.05)


@pytest.mark.parametrize(("strategy", "field"), [("allreduce", "codec"), ("wheel", "gradients")])
def test_a_training_says_if_the_declared_share_is_wrong(paceline, tmp_path, strategy, field):
    own = ("--strategy", strategy, "--set", f"{field}={DECLARED}", "--profile-s", "0.3")
    done = paceline("train", "lenet5", *own, "--epochs", "1")
    assert done.code == 0, done.err
    (said,) = (text for text in done.out.splitlines() if text.startswith("codec "))
    (folder,) = (tmp_path / "runs").iterdir()
    share = json.loads((folder / "result.json").read_text())["sent_share"]
    assert said.split(maxsplit=1)[1] == share["warning"]
    # A network that has learnt little has gradients above a thousandth almost everywhere.
    assert share["measured"] > 0.2
    assert f"{DECLARED} declares that it sends 0.05 of the values and has sent" in said


def test_a_threshold_without_a_share_is_refused_before_training(paceline):
    done = paceline("train", "lenet5", "--set", "codec=threshold:0.001", "--profile-s", "0.3")
    assert done.code == 2
    assert "declare the share of the values that it sends, such as threshold:0.001@0.01" in done.err
