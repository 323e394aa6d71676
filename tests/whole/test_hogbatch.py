"""Uneven workers as processes: each sample is used once per epoch, despite deaths and pauses."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from faults import failpoints
from findings import numbers
from processes import Started
from refusals import refused_field

slow = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
TESTS = PROGRAMS.parents[1]
TRAIN = ("train", "mlp-64-32-10", "--strategy", "hogbatch", "--profile-s", "0.1")
NUM_SAMPLES = 1438  # training samples of the digits
Runs = dict[str, dict[str, Any]]


@pytest.mark.parametrize(
    "workers",
    ["cpu:1,cpu:1@slow=4", *(pytest.param(one, marks=slow) for one in ("cpu:1,gpu:0", "gpu:0"))],
)
def test_a_run_learns_and_conforms_to_its_plan(outcome, monkeypatch, tmp_path: Path, workers):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", str(workers.count("gpu")))
    policy = ("policy=adaptive",)
    if "gpu" in workers:
        policy = ("policy=cpu_gpu", "--strategy-option", "cpu_batch=[8,64]")
    # Without --keep-all, admission may leave out the slow worker on a busy machine.
    how = ("--workers", workers, "--keep-all", "--learning-rate", "0.1", "--epochs", "4")
    result = outcome(*TRAIN, "--strategy-option", *policy, *how)
    assert result["accuracy"] > 0.85
    assert result["samples_per_s"] > 0
    assert (result["faults"], result["lost"]) == ([], [])
    assert set(result["updates"]["by_worker"]) == set(result["utilisation"])
    assert [row["spec"] for row in result["workers"]] == workers.split(",")
    samples = [row["samples"] for row in result["workers"]]
    assert (sum(samples), min(samples) > 0) == (4 * NUM_SAMPLES, True)
    assert all(0 < share <= 1 for share in result["utilisation"].values())
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").exists()
    assert (folder / "model.safetensors").stat().st_size > 4 * 64 * 32


@slow
def test_a_missing_device_is_refused(paceline):
    done = paceline(*TRAIN, "--workers", "gpu:0")
    assert (done.code, done.out) == (2, "")
    assert refused_field(done.err).startswith("worker 0 (gpu:0")


@slow
def test_a_worker_that_slows_down_the_other_is_left_out(outcome):
    """Both get batches of the same size, and one worker is 200 times slower."""
    how = ("--workers", "cpu:1,cpu:1@slow=200", "--strategy-option", "policy=hogbatch")
    result = outcome(*TRAIN, *how)
    (reason,) = result["decisions"]
    assert numbers(reason)[0] == 1
    assert [row["samples"] > 0 for row in result["workers"]] == [True, False]


def test_a_killed_worker_is_reported_and_others_train_its_samples(outcome):
    with failpoints({"at": "batch.done", "batch": 9, "do": "SIGKILL"}):
        result = outcome(*TRAIN, "--workers", "cpu:1,cpu:1", "--keep-all", "--epochs", "2")
    assert ["SIGKILL" in lost for lost in result["lost"]] == [True]
    assert sum(row["samples"] for row in result["workers"]) == 2 * NUM_SAMPLES


@slow
def test_a_run_ends_when_all_workers_are_killed(paceline):
    with failpoints({"at": "batch.done", "visit": 9, "do": "SIGKILL"}):
        done = paceline(*TRAIN, "--workers", "cpu:1,cpu:1", "--keep-all")
    assert done.code == 1
    assert "Traceback" not in done.err


HOW = ("--workers", "cpu:1,cpu:1", "--keep-all", "--batch-size", "8", *TRAIN[2:])


@pytest.fixture
def own_recipes(tmp_path: Path) -> None:
    shutil.copy(TESTS / "own_recipes.py", tmp_path)


@slow
@pytest.mark.usefixtures("own_recipes")
def test_a_recipe_of_tokens_learns(outcome):
    more = ("--epochs", "6", "--clip-norm", "5", "--precision", "bfloat16")
    result = outcome("train", "own_recipes:tokens", *HOW, *more)
    assert result["tokens_per_s"] == pytest.approx(12 * result["samples_per_s"])
    assert sum(row["samples"] for row in result["workers"]) == 6 * 64
    assert (result["faults"], result["lost"]) == ([], [])
    assert result["epochs"][-1]["test_loss"] < result["epochs"][0]["test_loss"]


@slow
@pytest.mark.usefixtures("own_recipes")
def test_a_sample_that_a_worker_cannot_read_ends_the_run_in_one_line(paceline):
    done = paceline("train", "own_recipes:unreadable", *HOW)
    assert done.code == 2
    assert refused_field(done.err).startswith("worker ")
    assert "sample 40 " in done.err
    assert "Traceback" not in done.err


ONE = "cpu:1"
WHOLE, TWICE = ONE, f"{ONE}/{ONE}"
WAYS = {
    "momentum": "own_data {} momentum=0.9 clip_norm=0.5",
    "adam": "own_data {} optimizer=adam learning_rate=0.01 precision=bfloat16",
    "constant": "own_data {} momentum=0.9 clip_norm=0.5 schedule=constant",
}
# Pause at the start, within epochs, before and after an epoch's test, and before the last test.
PAUSES = ("1", "40", "96", "e1", "131", "e2", "288")
ONCE_SAVED = WAYS["adam"].format(f"{WHOLE} +17")
RESUMED = {
    **{WAYS["momentum"].format(f"{TWICE} {pause}"): "momentum" for pause in PAUSES},
    WAYS["adam"].format(f"{TWICE} 131"): "adam",
    WAYS["momentum"].format(f"{ONE}/{ONE}/{ONE} 40/131"): "momentum",
    ONCE_SAVED: "adam",
}
COUNTED = {
    "the same": "counted cpu:1,cpu:1/cpu:1,cpu:1/cpu:1,cpu:1 200/e1",
    "others": "counted cpu:1,cpu:1,cpu:1/cpu:1,cpu:1/cpu:2,cpu:1@slow=2,cpu:1,cpu:1 500/900",
    "a killed one": "counted cpu:1,cpu:1,cpu:1/cpu:1,cpu:1/cpu:1 900/1300 kill=1",
    "one killed as it saves": "counted cpu:1,cpu:1/cpu:1,cpu:1 700 die=1",
    "a gpu": "counted gpu:0/gpu:0 700",
    "saved": "counted cpu:1,cpu:1,cpu:1 +90",
}
# With two CPU workers, or a CPU and a GPU worker, stop or kill one, or make its loss NaN.
HIT = {
    (how, beside): f"counted {workers} - {how}=1{more}"
    for how, more in (("stop", " deadline_s=3"), ("nan", ""), ("kill", ""))
    for beside, workers in (("cpu", "cpu:1,cpu:1"), ("gpu", "cpu:1,gpu:0"))
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Runs:
    """Run resuming.py with all runs, in one process; return the outcome of each run."""
    folder = tmp_path_factory.mktemp("resuming")
    for path in (PROGRAMS / "resuming.py", TESTS / "small_recipes.py"):
        shutil.copy(path, folder)
    asked = [way.format(f"{WHOLE} -") for way in WAYS.values()]
    asked += [*RESUMED, *COUNTED.values(), *HIT.values()]
    started = Started([sys.executable, "resuming.py", *" -- ".join(asked).split()], folder)
    try:
        done = started.finish(400)
        assert done.code == 0, done.err
        assert "Traceback" not in done.err
        assert not started.members()
    finally:
        started.kill()
    runs = dict(map(json.loads, done.out.splitlines()))
    assert {one["left"] for one in runs.values()} == {0}
    return runs


@slow
def test_one_worker_resumes_bit_for_bit(resumed: Runs):
    """Pause at different points, once or twice, or only save, with each optimizer and data set."""
    whole = {name: resumed[way.format(f"{WHOLE} -")] for name, way in WAYS.items()}
    for asked, way in RESUMED.items():
        run = resumed[asked]
        for key in ("bits", "epochs", "batches", "updates", "workers", "by_worker", "progress"):
            assert run[key] == whole[way][key], (asked, key)
        assert (run["covered"], run["lost"], run["faults"]) == ([1], [], [])
    assert resumed[ONCE_SAVED]["num_saved"] > 5
    # Different settings lead to different bits, so the comparisons above can fail.
    assert len({one["bits"] for one in whole.values()}) == len(WAYS)


@slow
@pytest.mark.parametrize("case", COUNTED)
def test_no_sample_is_lost_or_used_twice(resumed: Runs, case: str):
    run = resumed[COUNTED[case]]
    assert {row[0] for row in run["model"]["uses"]} == {3.0}
    assert sum(samples for _, samples in run["workers"]) == 3 * 600
    assert (run["covered"], run["progress"], run["faults"]) == ([1], [1800, 1800], [])
    if "killed" in case:  # a resumed run also reports workers that were lost before the pause
        (lost,) = run["lost"]
        assert "SIGKILL" in lost


@slow
@pytest.mark.parametrize(("how", "beside"), HIT)
def test_a_lost_worker_is_left_out_and_a_nan_loss_ends_the_run(
    resumed: Runs, how: str, beside: str
):
    run = resumed[HIT[how, beside]]
    if how == "nan":
        assert run["error"].startswith("InvalidInput: learning_rate: ")
        assert str(run["hit"][0]) in run["error"]
        return
    assert (len(run["lost"]), sum(samples for _, samples in run["workers"])) == (1, 3 * 600)
    uses = {row[0] for row in run["model"]["uses"]}
    # A GPU worker adds without locks, so two workers may overwrite each other's updates.
    assert uses == {3.0} if beside == "cpu" else max(uses) <= 3.0


@slow
def test_the_same_workers_keep_their_numbers_and_others_get_new_ones(resumed: Runs):
    assert resumed[COUNTED["the same"]]["by_worker"] == [0, 1]
    others = resumed[COUNTED["others"]]
    assert [name for name, _ in others["workers"]] == [f"cpu{number}" for number in range(9)]
    assert all(set(others["by_worker"]) & own for own in ({0, 1, 2}, {3, 4}, {5, 6, 7, 8}))
