"""Rehearsals of strategy wheel and of trees of hubs: real messages and paced layers."""

import re
from pathlib import Path

import pytest

from hubs import address_of, result_of
from paceline.record.trace import read_trace

pytestmark = pytest.mark.slow

FORWARD_S, BACKWARD_S, UPDATE_S, STEPS = 0.010, 0.020, 0.002, 6
ALL_STEPS = 2 + STEPS + 1  # including the three that are not measured
WORKERS, LANES = 4, 2
REHEARSE = (
    *("-m", "paceline", "rehearse", "lenet5", "--strategy", "wheel", "--device", "p100"),
    *("--forward-ms", "10", "--backward-ms", "20", "--update-ms", "2", "--steps", str(STEPS)),
    *("--profile-s", "0.05", "--json"),
)
IN_LANES = ("--workers", str(WORKERS), "--strategy-option", f"lanes={LANES}")
IN_TREE = ("--batch-size", "48", "--workers", "4", "--strategy-option", "child_hubs=2")
# In a step, each body device computes LANES bodies, and the hub's device WORKERS heads and updates.
# For any split of a model's time into body and head, one of the two takes at least LEAST_S.
LEAST_S = (LANES * (FORWARD_S + BACKWARD_S) + LANES * UPDATE_S) / (1 + LANES / WORKERS)
SHARE = 0.02  # of the body's gradients
BODY = 6 * 25 + 6 + 16 * 6 * 25 + 16  # values: two convolutions
WHOLE = BODY + (400 + 1) * 120 + (120 + 1) * 84 + (84 + 1) * 10
SENT = ("--strategy-option", f"gradients=threshold:0.5@{SHARE}")


def test_a_rehearsal_takes_the_devices_times_and_sends_the_declared_share(start, tmp_path: Path):
    result = result_of(start(*REHEARSE, *IN_LANES, *SENT))
    assert (result["origin"], result["faults"], result["lost"]) == ("rehearsed", [], [])
    updates = result["updates"]
    assert list(updates["by_worker"].values()) == [ALL_STEPS] * WORKERS
    stale = updates["staleness"]["all workers"]
    assert sum(stale.values()) == updates["count"] == WORKERS * ALL_STEPS
    assert all(row["nbytes"] == row["planned_nbytes"] > 0 for row in result["traffic"])
    assert result["step_s"] >= LEAST_S
    assert result["predicted_step_s"] >= 0.95 * LEAST_S  # sleeping layers wake up late at times
    assert list(result["utilisation"]) == ["cpu1", "cpu2"]
    (row,) = (row for row in result["traffic"] if row["purpose"] == "gradients")
    # Each message has tau and the index of each value sent.
    assert row["nbytes"] == WORKERS * ALL_STEPS * (4 + 4 * round(SHARE * BODY))
    assert result["sent_share"]["measured"] == round(SHARE * BODY) / BODY
    assert result["sent_share"]["warning"] is None
    (folder,) = (tmp_path / "runs").iterdir()
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    page = re.sub(r"(?s)<script.*?</script>", "", (folder / "report.html").read_text())
    assert "measured" not in page.lower()


def test_a_synchronous_tree_sends_the_bytes_of_its_plan(start):
    in_step = ("--strategy-option", "lanes=1", "--strategy-option", "staleness=0")
    result = result_of(start(*REHEARSE, *IN_TREE, *in_step, *SENT))
    assert (result["origin"], result["lost"], result["faults"]) == ("rehearsed", [], None)
    # Each of two children sends the mean gradient of its two workers once per step, and fetches the
    # parameters once before the first step.
    exchanges = 2 * ALL_STEPS
    assert result["updates"]["count"] == exchanges
    counted = {row["purpose"]: row["nbytes"] for row in result["traffic"]}
    assert {row["purpose"]: row["planned_nbytes"] for row in result["traffic"]} == counted
    assert counted["hubs_gradients"] == exchanges * 4 * WHOLE
    assert counted["hubs_parameters"] == (exchanges + 2) * 4 * WHOLE
    assert counted["gradients"] == 4 * ALL_STEPS * (4 + 4 * round(SHARE * BODY))
    # Two bodies share a child's head, and the root makes two updates per step.
    least_s = FORWARD_S + BACKWARD_S + 2 * UPDATE_S
    assert result["step_s"] >= least_s
    assert result["predicted_step_s"] >= 0.95 * least_s
    assert result["plans"][0]["config"]["child_hubs"] == 2


def test_child_hubs_that_join_rehearse_the_settings_of_the_root(start, worker_of):
    bind = ("--listen", "tcp://127.0.0.1:0")
    options = ("child_hubs=1", "lanes=2", "run_name=stage")
    tree = [word for option in options for word in ("--strategy-option", option)]
    root = start(*REHEARSE, "--workers", "2", *tree, *bind)
    joining = ("-m", "paceline", "hub", "--parent", address_of(root), *bind, "--run-name", "stage")
    child = start(*joining, "--json")
    worker = worker_of(address_of(child), "--run-name", "stage", "--worker-ids", "0,1")
    result, below = result_of(root), result_of(child)
    assert worker.finish().code == 0
    assert result["updates"]["count"] == below["num_pushed"] == ALL_STEPS
    counted = {row["purpose"]: row["nbytes"] for row in result["traffic"]}
    assert counted["gradients"] == 2 * ALL_STEPS * 4 * BODY
    assert result["predicted_step_s"] > 0
