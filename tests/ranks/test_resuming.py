"""Resumed runs end with the same bits as uninterrupted ones."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults import failpoints
from paceline.core.errors import Interrupted, InvalidInput
from paceline.links import interruption
from paceline.links.group import Group
from paceline.links.rendezvous import process_group
from paceline.runs.launching import requested
from paceline.runs.restarts import RunRequest, resuming
from paceline.runs.session import go_through
from pair import Ranks

TESTS = Path(__file__).parents[1]
STEPS = 50  # two epochs
RESULTS = ("model.safetensors", "result.json", "trace.json", "report.html")
Settings = dict[str, Any]


def request_of(settings: Settings) -> RunRequest:
    """Return the request of a short run in the folder `runs/one`."""
    known: Settings = {"model": "small_recipes:with_dropout", "batch_size": 24, "epochs": 2}
    known |= {"profile_s": 0.02, "workers": int(os.environ.get("WORLD_SIZE", "1"))}
    return requested("train", known | settings, quiet=True).model_copy(update={"run_id": "one"})


def attempt(group: Group, settings: Settings, is_resumed: bool) -> int | str:
    """Train or resume; return the step of an interruption, or the field of an error."""
    request = request_of(settings)
    try:
        go_through(resuming(request, Path("runs/one")) if is_resumed else request, group)
    except Interrupted as error:
        return error.num_steps
    except InvalidInput as error:
        return error.field
    return "done"


def train(settings: Settings, is_resumed: bool = False) -> int | str:
    """Train or resume on this rank."""
    interruption._POLL_S = interruption._MARGIN_S = 0.0  # the default seconds are many steps here
    with process_group(30.0) as group:
        return attempt(group, settings, is_resumed)


Run = Callable[..., list[int | str]]


@pytest.fixture
def run(pair: Ranks, triple: Ranks, tmp_path: Path) -> Run:
    """Train on two ranks, or on three; with `is_resumed`, from the last checkpoint."""

    def on_ranks(settings: Settings, is_resumed: bool = False) -> list[int | str]:
        ranks = triple if settings.get("workers") == 3 else pair
        return ranks(train, settings, is_resumed, group=False, cwd=tmp_path)

    return on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "one"


def learnt(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the bytes of the model, and its epochs without their durations."""
    epochs = json.loads((folder / "result.json").read_text())["epochs"]
    for epoch in epochs:
        del epoch["seconds"]
    return (folder / "model.safetensors").read_bytes(), epochs


def traffic(folder: Path) -> list[dict[str, Any]]:
    """Return the bytes per step that a run has measured, by purpose."""
    return json.loads((folder / "result.json").read_text())["traffic"]


def remove_results(folder: Path) -> None:
    for name in RESULTS:
        (folder / name).unlink()


SLOW = pytest.mark.slow
HOST, IN_THREES = {"strategy": "host"}, {"workers": 3}
LOCAL = {
    "strategy": "local",
    "options": {"sync_every": 8, "fragments": 2, "delay": 2, "codec": "e3m0+feedback"},
}
SPLIT = {"strategy": "subbatch", "model": "small_recipes:classes"}
AT_THE_END, BEFORE_THE_END = ({"checkpoint_every": str(STEPS - left)} for left in (0, 1))


@pytest.mark.parametrize(
    "settings",
    [
        HOST | {"accumulate": 3, "clip_norm": 0.5, "precision": "bfloat16"},
        {"strategy": "tree"},
        {"strategy": "allreduce", "options": {"codec": "onebit"}},  # has error feedback
        LOCAL | {"schedule": "cosine", "evaluate_every": 11},
        SPLIT | {"options": {"gradients": "onebit"}, "schedule": "cosine"},
        pytest.param(
            SPLIT | {"options": {"updates": "sub-batch"}, "schedule": "cosine"}, marks=SLOW
        ),
        # With three ranks, the bits of sums depend on the boundaries of shards.
        pytest.param({"strategy": "allreduce"} | IN_THREES, marks=SLOW),
        # The last checkpoint is at the last step, or one step before it.
        HOST | AT_THE_END,
        pytest.param(HOST | BEFORE_THE_END, marks=SLOW),
        pytest.param(LOCAL | AT_THE_END, marks=SLOW),
        pytest.param(LOCAL | BEFORE_THE_END, marks=SLOW),
        pytest.param(SPLIT | AT_THE_END, marks=SLOW),
        pytest.param(SPLIT | BEFORE_THE_END, marks=SLOW),
    ],
    ids=lambda settings: settings["strategy"],
)
def test_a_run_is_resumed_bit_for_bit(run: Run, folder: Path, settings: Settings) -> None:
    settings = {"checkpoint_every": "37"} | settings
    run(settings)
    before, sent = learnt(folder), traffic(folder)
    remove_results(folder)
    run(settings, is_resumed=True)
    assert learnt(folder) == before
    assert traffic(folder) == (sent if settings["checkpoint_every"] != str(STEPS) else [])
    assert {path.name for path in folder.iterdir()} == {*RESULTS, "run.toml", "checkpoints"}


def test_an_interrupted_run_is_saved_and_resumed_bit_for_bit(run: Run, folder: Path) -> None:
    settings = HOST | {"checkpoint_every": "never"}
    run(settings)
    before = learnt(folder)
    shutil.rmtree(folder)
    with failpoints({"at": "step.done", "worker": 1, "step": 30, "do": "SIGINT"}):
        stopped = run(settings)
    assert stopped[0] == stopped[1]
    assert 30 <= stopped[0] < STEPS
    assert not (folder / "result.json").exists()
    run(settings, is_resumed=True)
    assert learnt(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        HOST | {"model": "small_recipes:plain"},
        SPLIT | {"model": "mlp-64-11-10", "optimizer": "adamw", "learning_rate": 0.01},
    ],
)
def test_another_number_of_workers_uses_the_same_samples(run: Run, folder: Path, settings):
    settings = settings | {"checkpoint_every": "37", "schedule": "cosine"}
    run(settings)
    expected, whole = load_file(folder / "model.safetensors"), learnt(folder)[1]
    run(settings | IN_THREES, is_resumed=True)
    found = load_file(folder / "model.safetensors")
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-5)
    for epoch, same in zip(learnt(folder)[1], whole, strict=True):
        assert epoch["train_loss"] == pytest.approx(same["train_loss"], rel=1e-4)


@pytest.mark.slow
def test_another_number_of_workers_resumes_with_the_groups_parameters(run: Run, folder: Path):
    settings = LOCAL | {"model": "small_recipes:plain", "epochs": 4, "checkpoint_every": "37"}
    run(settings)
    whole = learnt(folder)[1]
    remove_results(folder)
    run(settings | IN_THREES, is_resumed=True)
    found = learnt(folder)[1]
    # The progress of the first epochs was kept.
    assert found[-1]["test_loss"] < 1.5 * whole[-1]["test_loss"] < whole[0]["test_loss"]


@pytest.mark.slow
def test_a_run_with_a_coordinator_is_resumed_bit_for_bit(monkeypatch, tmp_path: Path, folder: Path):
    """Strategy wheel has a test of its own: test_a_killed_hub_resumes_from_its_checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    settings = {"strategy": "hogbatch", "model": "small_recipes:classes", "workers": "cpu:1"}
    settings |= {"options": {"policy": "hogbatch"}, "epochs": 10, "checkpoint_every": "37"}
    alone = Group.alone(torch.device("cpu"), 60.0)
    attempt(alone, settings, False)
    before = learnt(folder)
    remove_results(folder)
    attempt(alone, settings, True)
    assert learnt(folder) == before


def test_a_finished_run_is_resumed_for_more_epochs(run: Run, folder: Path) -> None:
    settings = {"strategy": "host", "model": "small_recipes:classes", "checkpoint_every": "24"}
    run(settings | {"epochs": 1})
    run(settings, is_resumed=True)
    assert len(learnt(folder)[1]) == 2


def test_a_host_run_resumes_with_allreduce_and_a_locked_checkpoint_folder(run, folder):
    """Sums of two ranks have the same bits in any order."""
    settings = {"model": "small_recipes:plain", "checkpoint_every": "37"}
    run(settings | HOST)
    before = learnt(folder)
    checkpoints = os.open(folder / "checkpoints", os.O_RDONLY)
    fcntl.flock(checkpoints, fcntl.LOCK_EX)  # as if another process were writing there
    try:
        run(settings | {"strategy": "allreduce", "checkpoint_every": "10"}, is_resumed=True)
    finally:
        os.close(checkpoints)
    assert learnt(folder) == before
    assert [one.name for one in (folder / "checkpoints").iterdir()] == ["step-00000037"]


def attempts(settings: Settings, changes: list[Settings]) -> list[int | str]:
    """Train, and try to resume with each of the changes."""
    with process_group(30.0) as group:
        attempt(group, settings, False)
        return [attempt(group, settings | change, True) for change in changes]


def test_resuming_with_changed_settings_is_refused(pair: Ranks, tmp_path: Path) -> None:
    changes = [{"batch_size": 30}, {"seed": 3}, {"model": "small_recipes:plain"}]
    fields = ["resume"] * 4
    settings = HOST | {"checkpoint_every": "37", "epochs": 2}
    found = pair(attempts, settings, [*changes, {"optimizer": "sgd"}], group=False, cwd=tmp_path)
    assert found == [fields, fields]


@pytest.mark.parametrize("files", [[], ["checkpoints/.hidden"]])
def test_a_folder_without_a_checkpoint_is_refused(pair: Ranks, tmp_path: Path, files) -> None:
    for name in files:
        (tmp_path / "runs" / "one" / name).parent.mkdir(parents=True)
    assert pair(train, HOST, True, group=False, cwd=tmp_path) == ["resume", "resume"]
