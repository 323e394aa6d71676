"""Runs that pause and go on: bit by bit with one worker, without losing a sample with more."""

import json
import sys

import pytest

from launched import PROGRAMS
from processes import Started

pytestmark = pytest.mark.slow

RESUMING = str(PROGRAMS / "resuming.py")
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


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """What came of each run; one process coordinates them one after another."""
    asked = [way.format(f"{WHOLE} -") for way in WAYS.values()]
    asked += [WAYS["momentum"].format(f"{TWICE} {pause}") for pause in PAUSES]
    asked += [WAYS[way].format(f"{TWICE} 131") for way in ("adam", "shared")]
    asked += [WAYS["momentum"].format(f"{ONE}/{ONE}/{ONE} 40/131")]
    asked += [WAYS["adam"].format(f"{WHOLE} +17")]
    asked += [*COUNTED.values(), STEPS, STEPS_LATER, *STOPPING]
    words = " -- ".join(asked).split()
    program = Started([sys.executable, RESUMING, *words], tmp_path_factory.mktemp("resuming"))
    try:
        done = program.finish(300)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert not program.members()
    finally:
        program.kill()
    runs = dict(map(json.loads, done.out.splitlines()))
    assert {one["left"] for one in runs.values()} == {0}
    runs["said"] = {"err": done.err}
    return runs


def assert_same(run: dict, whole: dict) -> None:
    """The same bits, losses, batches and counts, as if nothing had happened."""
    for key in ("bits", "epochs", "batches", "updates", "workers", "by_worker", "progress"):
        assert run[key] == whole[key], key
    assert run["covered"] == [1]
    assert (run["lost"], run["faults"]) == ([], [])


@pytest.mark.parametrize("pause", PAUSES)
def test_one_worker_goes_on_bit_by_bit_wherever_it_was_stopped(found, pause: str):
    way = WAYS["momentum"]
    assert_same(found[way.format(f"{TWICE} {pause}")], found[way.format(f"{WHOLE} -")])


@pytest.mark.parametrize("way", ["adam", "shared"])
def test_so_it_does_with_other_optimizers_and_data_in_shared_memory(found, way: str):
    assert_same(found[WAYS[way].format(f"{TWICE} 131")], found[WAYS[way].format(f"{WHOLE} -")])


def test_a_run_may_be_resumed_again(found):
    way = WAYS["momentum"]
    twice = found[way.format(f"{ONE}/{ONE}/{ONE} 40/131")]
    assert_same(twice, found[way.format(f"{WHOLE} -")])


def test_a_run_that_is_only_saved_is_as_if_it_was_not(found):
    saved = found[WAYS["adam"].format(f"{WHOLE} +17")]
    assert saved["num_saved"] > 5
    assert_same(saved, found[WAYS["adam"].format(f"{WHOLE} -")])


def test_ways_of_training_differ(found):
    """Otherwise the comparisons above would show nothing."""
    bits = {found[way.format(f"{WHOLE} -")]["bits"] for way in WAYS.values()}
    assert len(bits) == len(WAYS)


@pytest.mark.parametrize("case", COUNTED)
def test_no_sample_is_lost_or_done_twice(found, case: str):
    run = found[COUNTED[case]]
    assert {row[0] for row in run["model"]["uses"]} == {3.0}
    assert run["covered"] == [1]
    assert sum(samples for _, samples in run["workers"]) == 3 * 600
    assert run["progress"] == [1800, 1800]
    assert run["faults"] == []


def test_the_same_workers_keep_their_numbers_and_others_get_new_ones(found):
    assert found[COUNTED["the same"]]["by_worker"] == [0, 1]
    others = found[COUNTED["others"]]
    assert [name for name, _ in others["workers"]] == [f"cpu{number}" for number in range(9)]
    assert set(others["by_worker"]) & {0, 1, 2}
    assert set(others["by_worker"]) & {3, 4}
    assert set(others["by_worker"]) & {5, 6, 7, 8}
    said = "go on with what cpu:1, cpu:1, cpu:1 have trained; their optimizers (momentum) and"
    assert f"resume: workers cpu:1, cpu:1 {said}" in found["said"]["err"]


def test_a_worker_that_was_lost_before_is_reported_after(found):
    (killed,) = found[COUNTED["a killed one"]]["lost"]
    assert "was ended by SIGKILL" in killed
    (died,) = found[COUNTED["one killed as it saves"]]["lost"]
    assert "was ended by SIGKILL" in died


@pytest.mark.parametrize("run", [STEPS, STEPS_LATER])
def test_steps_are_as_many_batches_of_the_batch_size(found, run: str):
    """50 times 16 samples of 600: an epoch, and a part of the next."""
    uses = [row[0] for row in found[run]["model"]["uses"]]
    assert sorted(set(uses)) == [1.0, 2.0]
    assert sum(uses) == 50 * 16 == sum(samples for _, samples in found[run]["workers"])
    assert [number for number, *_ in found[run]["epochs"]] == [0, 1]
    assert found[run]["progress"] == [800, 800]


@pytest.mark.parametrize("run", STOPPING)
def test_the_schedule_goes_with_the_samples_of_the_run_whatever_the_batches_are(found, run: str):
    """In batches of 5 and more samples, the rate is zero after an epoch of 6 steps."""
    first, second, third = (test_loss for _, _, test_loss in found[run]["epochs"])
    assert first < 0.65  # it has learnt
    assert first == second == third
