"""Uneven workers as real processes: every sample once an epoch, whoever dies, joins or fails."""

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from faults import failpoints
from paceline.strategies.hogbatch.config import PolicyName
from processes import ENDING_S, Started
from refusals import refused_field

slow = pytest.mark.slow
PROGRAMS = Path(__file__).parent / "programs"
TRAIN = ("train", "mlp-64-32-10", "--strategy", "hogbatch", "--profile-s", "0.1")
NUM_SAMPLES = 1438  # of the digits, to train on
KILLS = {policy: f"kill/{policy}/cpu:1,cpu:1/3" for policy in get_args(PolicyName)}
KILLS["adaptive"] = "kill/adaptive/cpu:1,cpu:1,cpu:1/3"
STOP = "stop/adaptive/cpu:1,cpu:1/2"
JOIN = "join/adaptive/cpu:2@slow=3/100000"
NAN = "nan/adaptive/cpu:1,cpu:1/2"
ON_GPU = "gpu/cpu_gpu/gpu:0/3"
BESIDE_GPU = {kind: f"{kind}/cpu_gpu/cpu:1,gpu:0/3" for kind in ("kill", "stop", "nan")}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What came of each run; one process coordinates them one after another."""
    asked = [*KILLS.values(), STOP, JOIN, NAN, ON_GPU, *BESIDE_GPU.values()]
    command = [sys.executable, str(PROGRAMS / "uneven.py"), *asked]
    program = Started(command, tmp_path_factory.mktemp("uneven"))
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


@slow
@pytest.mark.parametrize("policy", KILLS)
def test_a_killed_worker_gives_its_samples_to_the_others(found, policy: str):
    run = found[KILLS[policy]]
    assert run["uses"] == [3.0] * 600
    (lost,) = run["lost"]
    assert "SIGKILL" in lost
    assert run["num_peaks"] == KILLS[policy].count("cpu:") - 1


@slow
def test_a_worker_that_does_not_answer_is_given_up(found):
    assert (found[STOP]["uses"], len(found[STOP]["lost"])) == ([2.0] * 600, 1)


@slow
def test_a_worker_joins_late_and_every_sample_is_used_once_an_epoch(found):
    run = found[JOIN]
    assert (run["workers"], run["uses"]) == ([0, 1], [float(run["epochs"])] * 600)
    assert run["samples"] == run["epochs"] * 600
    assert (run["lost"], run["faults"]) == ([], [])


@slow
def test_a_simulated_gpu_uses_every_sample_once_an_epoch(found):
    assert found[ON_GPU]["uses"] == [3.0] * 600
    assert (found[ON_GPU]["lost"], found[ON_GPU]["faults"]) == ([], [])
    for case in ("kill", "stop"):
        # Whichever of two is lost; without locks, one may overwrite what the other has added.
        run = found[BESIDE_GPU[case]]
        assert run["samples"] == 3 * 600
        assert max(run["uses"]) <= 3.0
        assert len(run["lost"]) == 1


@slow
def test_a_loss_that_is_no_number_ends_the_run(found):
    for case in (NAN, BESIDE_GPU["nan"]):
        assert found[case]["error"].startswith("InvalidInput: learning_rate: "), case
    assert str(found[NAN]["hit"][0]) in found[NAN]["error"]


def test_a_run_from_the_command_line(outcome, tmp_path: Path):
    # With force: on a busy machine the slow worker may be found to slow the other one down.
    workers = ("--policy", "adaptive", "--workers", "cpu:1,cpu:1@slow=4", "--force")
    result = outcome(*TRAIN, *workers, "--learning-rate", "0.1", "--epochs", "4")
    assert set(result["updates"]["by_worker"]) == set(result["utilisation"]) == {"cpu0", "cpu1"}
    assert min(result["updates"]["by_worker"].values()) > 0
    assert all(0 < share <= 1 for share in result["utilisation"].values())
    assert result["accuracy"] > 0.85
    assert result["samples_per_s"] > 0
    assert (result["faults"], result["lost"]) == ([], [])
    assert sum(row["samples"] for row in result["workers"]) == 4 * NUM_SAMPLES
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "report.html").stat().st_size > 0
    assert (folder / "model.safetensors").stat().st_size > 4 * 64 * 32


@slow
@pytest.mark.parametrize("workers", ["cpu:1,gpu:0", "gpu:0"])
def test_a_run_on_a_simulated_gpu_learns_and_conforms_to_its_plan(outcome, monkeypatch, workers):
    monkeypatch.setenv("PACELINE_SIMULATED_GPUS", "1")
    options = ("--policy", "cpu_gpu", "--set", "cpu_batch=[8,64]", "--force")
    options += ("--workers", workers, "--learning-rate", "0.1", "--epochs", "4")
    result = outcome(*TRAIN, *options)
    assert result["accuracy"] > 0.85
    assert (result["faults"], result["lost"]) == ([], [])
    assert sum(row["samples"] for row in result["workers"]) == 4 * NUM_SAMPLES
    assert all(0 < share <= 1 for share in result["utilisation"].values())
    on_gpu = next(row for row in result["workers"] if row["spec"] == "gpu:0")
    assert on_gpu["samples"] > 0


@slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--workers", "gpu:0"],  # of which this machine has none
        ["--workers", "cpu:1,cpu:1@slow=200", "--policy", "hogbatch"],  # slows the other down
    ],
)
def test_workers_that_cannot_help_are_refused(paceline, arguments: list[str]):
    done = paceline(*TRAIN, *arguments)
    assert (done.code, done.out) == (2, "")
    assert refused_field(done.err).startswith("worker")


def test_a_worker_that_is_killed_is_reported_and_its_samples_are_done(outcome):
    with failpoints({"at": "batch.done", "batch": 9, "do": "SIGKILL"}):
        result = outcome(*TRAIN, "--workers", "cpu:1,cpu:1", "--force", "--epochs", "2")
    (lost,) = result["lost"]
    assert "SIGKILL" in lost
    assert sum(row["samples"] for row in result["workers"]) == 2 * NUM_SAMPLES


@slow
def test_a_run_without_workers_ends(paceline):
    with failpoints({"at": "batch.done", "visit": 9, "do": "SIGKILL"}):
        done = paceline(*TRAIN, "--workers", "cpu:1,cpu:1", "--force")
    assert done.code == 1
    assert "Traceback" not in done.err


@slow
def test_a_killed_coordinator_takes_its_workers_with_it(start):
    with failpoints({"at": "epoch.begun", "epoch": 1, "do": "SIGKILL"}):
        run = start("-m", "paceline", *TRAIN, "--workers", "cpu:1")
        assert run.finish().code == -signal.SIGKILL
    until = time.monotonic() + ENDING_S
    while run.members():
        assert time.monotonic() < until
        time.sleep(0.05)


MINE = '''
class Steps:
    """Eight samples, then sixteen, and so on up to 64: whatever the others do."""

    def __init__(self, workers):
        assert all(speed > 0 for speed in workers.speeds)
        self.most = [64 for spec in workers.specs]

    def next_batch(self, worker, updates, sizes):
        return min(2 * sizes[worker] or 8, 64)


class Late(Steps):
    """Too much, but not at once."""

    asked = 0

    def next_batch(self, worker, updates, sizes):
        self.asked += 1
        return 8 if self.asked < 50 else 65
'''


@slow
def test_a_policy_of_the_users_decides_the_sizes_and_is_compared(paceline, outcome, tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    quick = ("--workers", "cpu:1,cpu:1", "--force", "--epochs", "2")
    own, adaptive = (
        outcome(*TRAIN, *quick, "--policy", policy) for policy in ("mine:Steps", "adaptive")
    )
    assert own["config"]["policy"] == "mine:Steps"
    for worker in own["workers"]:
        sizes = [size for _, size in worker["batch_sizes"]]
        assert (sizes[:4], max(sizes)) == ([8, 16, 32, 64], 64)
    assert sum(worker["samples"] for worker in own["workers"]) == 2 * NUM_SAMPLES
    folders = [f"runs/{result['id']}" for result in (own, adaptive, own)]
    compared = outcome("compare", *folders, "--page", "both.html")["runs"]
    assert all(sum(side["update_shares"].values()) == pytest.approx(1) for side in compared)
    assert 'id="figure-losses"' in (tmp_path / "both.html").read_text()
    done = paceline(*TRAIN, *quick, "--policy", "mine:Late")
    assert (done.code, refused_field(done.err)) == (2, "policy")


@pytest.fixture
def training(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """The command that trains a recipe of programs/hogbatch_recipes.py."""
    shutil.copy(PROGRAMS / "hogbatch_recipes.py", tmp_path)
    how = ("--strategy", "hogbatch", "--workers", "cpu:1,cpu:1", "--profile-s", "0.1", "--force")
    return lambda name, *more: ("train", f"hogbatch_recipes:{name}", *how, *more)


@slow
def test_a_recipe_of_tokens_learns(outcome, training):
    how = ("--epochs", "6", "--clip-norm", "5", "--precision", "bfloat16")
    result = outcome(*training("text", *how, "--learning-rate", "0.3"))
    assert result["score"] == "right tokens"
    assert result["epochs"][-1]["score"] > 0.9
    assert result["tokens_per_s"] == pytest.approx(8 * result["samples_per_s"])
    assert sum(row["samples"] for row in result["workers"]) == 6 * 300
    assert (result["faults"], result["lost"]) == ([], [])
    assert result["epochs"][-1]["test_loss"] < result["epochs"][0]["test_loss"]


@slow
def test_a_recipe_without_tests_and_without_a_score_is_trained(outcome, training):
    result = outcome(*training("without_tests", "--steps", "6", "--batch-size", "50"))
    assert [one["test_loss"] for one in result["epochs"]] == [None, None]
    assert sum(row["samples"] for row in result["workers"]) == 300


@slow
def test_a_sample_that_a_worker_cannot_read_ends_the_run_in_one_line(paceline, training):
    done = paceline(*training("raising"))
    assert (done.code, done.out) == (2, "")
    assert refused_field(done.err).startswith("worker ")
    assert "sample 150 " in done.err
    assert "Traceback" not in done.err
