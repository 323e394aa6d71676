"""Whole rehearsals of strategy wheel: the real hub, bodies and wire, and layers that take time."""

import json
import re
from pathlib import Path

import pytest

from paceline.record.trace import read_trace
from processes import Started

FORWARD_S, BACKWARD_S, UPDATE_S, STEPS = 0.010, 0.020, 0.002, 6
WORKERS, LANES = 4, 2
REHEARSE = (
    *("-m", "paceline", "rehearse", "lenet5", "--strategy", "wheel", "--device", "p100"),
    *("--forward-ms", "10", "--backward-ms", "20", "--update-ms", "2", "--steps", str(STEPS)),
    *("--workers", str(WORKERS), "--set", f"lanes={LANES}", "--profile-s", "0.05"),
)
# Bodies need 2 of them a step on their device, heads and updates 4 on the hub's; and so both sides
# cannot be below their shares of all that is to be computed.
LEAST_S = (LANES * (FORWARD_S + BACKWARD_S) + LANES * UPDATE_S) / (1 + LANES / WORKERS)

PROGRAM = """
import json
import paceline

pytestmark = pytest.mark.slow

done = paceline.rehearse(
    "lenet5", device="p100", strategy="wheel", forward_ms=4, backward_ms=8, update_ms=1, steps=3,
    options={"lanes": 1, "staleness": 0}, workers=1, profile_s=0.05,
)
print(json.dumps({
    "result": json.loads(done.result.model_dump_json()),
    "origin": done.timeline.origin,
    "report": done.report("mine.html").name,
}))
"""


def check(result: dict, workers: int, steps: int) -> None:
    assert (result["origin"], result["devices"]) == ("rehearsed", "paced as power8-p100/gpu0")
    assert (result["faults"], result["lost"]) == ([], [])
    updates = result["updates"]
    assert list(updates["by_worker"].values()) == [steps + 3] * workers
    stale = updates["staleness"]["all workers"]
    assert sum(stale.values()) == updates["count"] == workers * (steps + 3)
    for row in result["traffic"]:
        assert row["nbytes"] == row["planned_nbytes"] > 0, row
    assert result["lower_quartile_s"] <= result["upper_quartile_s"]


def test_a_rehearsal_says_that_it_is_one_and_takes_the_devices_times(start, paceline, tmp_path):
    done = start(*REHEARSE, "--codec", "gradients=dynamic8,activations=half").finish()
    assert done.code == 0, done.err
    assert "rehearsed  no training: 4 workers paced as power8-p100/gpu0" in done.out
    assert "measured" not in done.out
    (folder,) = (tmp_path / "runs").iterdir()
    assert "rehearsed" in folder.name
    files = {"result.json", "trace.json", "report.html", "run.toml"}
    assert {path.name for path in folder.iterdir()} == files
    result = json.loads((folder / "result.json").read_text())
    check(result, WORKERS, STEPS)
    assert result["step_s"] >= LEAST_S
    assert result["predicted_step_s"] >= 0.95 * LEAST_S  # layers wake up late by turns
    assert result["samples_per_s"] == pytest.approx(64 / result["step_s"], rel=0.5)
    assert list(result["utilisation"]) == ["cpu1", "cpu2"]
    assert set(read_trace(folder / "trace.json")) == {"predicted", "rehearsed"}
    page = (folder / "report.html").read_text()
    assert "rehearsed, not trained: paced as power8-p100/gpu0" in page
    assert "measured" not in re.sub(r"(?s)<script.*?</script>", "", page).lower()
    assert paceline("report", str(folder)).code == 0
    compared = paceline("compare", str(folder), "--json")
    assert json.loads(compared.out)["right"] == "rehearsed"


def test_workers_of_elsewhere_learn_from_the_hub_that_they_rehearse(start, paceline, tmp_path):
    assert paceline("hub", "--generate-keys", "keys").code == 0
    bind = ("--bind", "tcp://127.0.0.1:0", "--keys", "keys", "--run", "stage", "--json")
    hub = start(*REHEARSE, *bind)
    address = listening(hub)
    join = ("-m", "paceline", "worker", "--connect", address, "--keys", "keys", "--run", "stage")
    own = ("--device", "cpu", "--threads", "1", "--as")
    workers = [start(*join, *own, listed) for listed in ("0,1", "2,3")]
    done = hub.finish()
    assert done.code == 0, done.err
    result = json.loads(done.out)
    check(result, WORKERS, STEPS)
    assert result["step_s"] >= LEAST_S
    for worker in workers:
        ended = worker.finish(20)
        assert ended.code == 0, ended.err


def listening(hub: Started) -> str:
    """Return where the hub listens."""
    for text in iter(hub.process.stderr.readline, ""):
        if found := re.search(r"listening on (tcp://\S+);", text):
            return found[1]
    raise AssertionError("the hub has ended")


def test_a_program_rehearses_one_worker_that_nothing_is_late_for(start, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = start("program.py").finish()
    assert done.code == 0, done.err
    said = json.loads(done.out)
    check(said["result"], 1, 3)
    assert said["result"]["step_s"] >= 0.013
    assert said["result"]["updates"]["staleness"] == {"all workers": {"0": 6}}
    assert (said["origin"], said["report"]) == ("rehearsed", "mine.html")


def test_a_declared_share_of_the_bodys_gradients_travels_and_is_checked(paceline):
    share, num_values = 0.02, 6 * 25 + 6 + 16 * 6 * 25 + 16  # of the body: two convolutions
    own = ("--set", f"gradients=threshold:0.5@{share}", "--json")
    done = paceline(*REHEARSE[2:], *own)
    assert done.code == 0, done.err
    result = json.loads(done.out)
    check(result, WORKERS, STEPS)
    (row,) = (row for row in result["traffic"] if row["purpose"] == "gradients")
    # Tau, and the place of each value that is sent.
    assert row["nbytes"] == WORKERS * (STEPS + 3) * (4 + 4 * round(share * num_values))
    assert result["sent_share"]["measured"] == round(share * num_values) / num_values
    assert result["sent_share"]["warning"] is None
