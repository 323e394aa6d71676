"""Runs that pause and go on: bit by bit with one worker, without losing a sample with more."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from processes import Started

pytestmark = pytest.mark.slow
RESUMING = Path(__file__).parent / "programs" / "resuming.py"
ONE = "cpu:1"
WHOLE, TWICE = ONE, f"{ONE}/{ONE}"
WAYS = {
    "momentum": "own_data {} momentum=0.9 clip_norm=0.5",
    "adam": "own_data {} optimizer=adam learning_rate=0.01 precision=bfloat16",
    "shared": "shared_data {} momentum=0.9",
}
# At once, within epochs, at the end of one before its test, after it, and before the last test.
PAUSES = ("1", "40", "96", "e1", "131", "e2", "288")
COUNTED = {
    "the same": "counted cpu:1,cpu:1/cpu:1,cpu:1/cpu:1,cpu:1 200/e1",
    "others": "counted cpu:1,cpu:1,cpu:1/cpu:1,cpu:1/cpu:2,cpu:1@slow=2,cpu:1,cpu:1 500/900",
    "a killed one": "counted cpu:1,cpu:1,cpu:1/cpu:1,cpu:1/cpu:1 900/1300 kill=1",
    "one killed as it saves": "counted cpu:1,cpu:1/cpu:1,cpu:1 700 die=1",
    "a gpu": "counted gpu:0/gpu:0 700",
    "saved": "counted cpu:1,cpu:1,cpu:1 +90",
}
STOPPING = ("stopping cpu:1,cpu:1 -", "stopping cpu:1/cpu:1 200")
STEPS, STEPS_LATER = "counted cpu:1,cpu:1 - steps=50", "counted cpu:1/cpu:1 700 steps=50"


Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Runs:
    """What came of each run; one process coordinates them one after another."""
    asked = [way.format(f"{WHOLE} -") for way in WAYS.values()]
    asked += [WAYS["momentum"].format(f"{TWICE} {pause}") for pause in PAUSES]
    asked += [WAYS[way].format(f"{TWICE} 131") for way in ("adam", "shared")]
    asked += [WAYS["momentum"].format(f"{ONE}/{ONE}/{ONE} 40/131")]
    asked += [WAYS["adam"].format(f"{WHOLE} +17")]
    asked += [*COUNTED.values(), STEPS, STEPS_LATER, *STOPPING]
    words = " -- ".join(asked).split()
    command = [sys.executable, str(RESUMING), *words]
    program = Started(command, tmp_path_factory.mktemp("resuming"))
    try:
        done = program.finish(300)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert not program.members()
    finally:
        program.kill()
    runs = dict(map(json.loads, done.out.splitlines()))
    assert {one["left"] for one in runs.values()} == {0}
    return runs


def test_one_worker_goes_on_bit_by_bit(found: Runs):
    """Wherever it was stopped, once or twice or only saved, with any optimizer and data."""
    whole = {name: found[way.format(f"{WHOLE} -")] for name, way in WAYS.items()}
    resumed = [("momentum", f"{TWICE} {pause}") for pause in PAUSES]
    resumed += [("adam", f"{TWICE} 131"), ("shared", f"{TWICE} 131"), ("adam", f"{WHOLE} +17")]
    resumed += [("momentum", f"{ONE}/{ONE}/{ONE} 40/131")]
    for way, how in resumed:
        run = found[WAYS[way].format(how)]
        for key in ("bits", "epochs", "batches", "updates", "workers", "by_worker", "progress"):
            assert run[key] == whole[way][key], (way, how, key)
        assert (run["covered"], run["lost"], run["faults"]) == ([1], [], [])
    assert found[WAYS["adam"].format(f"{WHOLE} +17")]["num_saved"] > 5
    # Otherwise the comparisons above would show nothing.
    assert len({one["bits"] for one in whole.values()}) == len(WAYS)


@pytest.mark.parametrize("case", COUNTED)
def test_no_sample_is_lost_or_done_twice(found: Runs, case: str):
    run = found[COUNTED[case]]
    assert {row[0] for row in run["model"]["uses"]} == {3.0}
    assert run["covered"] == [1]
    assert sum(samples for _, samples in run["workers"]) == 3 * 600
    assert (run["progress"], run["faults"]) == ([1800, 1800], [])


def test_the_same_workers_keep_their_numbers_and_others_get_new_ones(found: Runs):
    assert found[COUNTED["the same"]]["by_worker"] == [0, 1]
    others = found[COUNTED["others"]]
    assert [name for name, _ in others["workers"]] == [f"cpu{number}" for number in range(9)]
    assert set(others["by_worker"]) & {0, 1, 2}
    assert set(others["by_worker"]) & {3, 4}
    assert set(others["by_worker"]) & {5, 6, 7, 8}


def test_a_worker_that_was_lost_before_is_reported_after(found: Runs):
    for case in ("a killed one", "one killed as it saves"):
        (lost,) = found[COUNTED[case]]["lost"]
        assert "SIGKILL" in lost


@pytest.mark.parametrize("run", [STEPS, STEPS_LATER])
def test_steps_are_as_many_batches_of_the_batch_size(found: Runs, run: str):
    """50 times 16 samples of 600: an epoch, and a part of the next."""
    uses = [row[0] for row in found[run]["model"]["uses"]]
    assert sorted(set(uses)) == [1.0, 2.0]
    assert sum(uses) == 50 * 16 == sum(samples for _, samples in found[run]["workers"])
    assert [number for number, *_ in found[run]["epochs"]] == [0, 1]
    assert found[run]["progress"] == [800, 800]


@pytest.mark.parametrize("run", STOPPING)
def test_the_schedule_goes_with_the_samples_of_the_run_whatever_the_batches_are(found, run):
    """In batches of 5 and more samples, the rate is zero after an epoch of 6 steps."""
    first, second, third = (test_loss for _, _, test_loss in found[run]["epochs"])
    assert first < 0.65  # it has learnt
    assert first == second == third
