"""Errors of a run after its model and data are loaded, its folder, and its restart."""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoints.folder import CheckpointFolder
from paceline.core.errors import PacelineError
from paceline.core.settings import TrainSettings
from paceline.exchange.checkpoints import CHECKPOINTS
from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.links.rendezvous import process_group
from paceline.runs.folder import run_folder
from paceline.runs.launching import requested
from paceline.runs.restarts import RunRequest, restarted
from paceline.runs.session import go_through
from refusals import refused


def train(tmp_path: Path, **values: object) -> None:
    """Train in this process."""
    known = {"model": "lenet5", "workers": 1, "profile_s": 0.02, "epochs": 1}
    request = requested("train", known | {"output": tmp_path / "runs"} | values, quiet=True)
    go_through(request, Group.alone(torch.device("cpu"), 60.0))


def train_with_own_seed() -> None:
    with process_group(30.0) as group, refused("seed"):
        request = requested("train", {"model": "lenet5", "seed": group.rank}, quiet=True)
        go_through(request, group)


def test_ranks_with_different_settings_are_refused(pair: Any, tmp_path: Path) -> None:
    """As on machines with different configuration files."""
    pair(train_with_own_seed, group=False, cwd=tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": "torch.nn:ReLU"}, "torch.nn:ReLU"),
        ({"data": "images:none"}, "data"),
        ({"batch_size": 1000}, "batch_size"),  # only 2 steps per epoch, so none is measured
        ({"learning_rate": 1e38}, "learning_rate"),
        ({"model": "own_recipes:tokens", "data": "digits"}, "data"),
        ({"model": "own_recipes:uneven"}, "own_recipes:uneven"),
        ({"model": "own_recipes:unreadable"}, "own_recipes:unreadable"),
        ({"model": "own_recipes:leaves"}, "own_recipes:leaves"),
        ({"model": "own_recipes:vector_of_several"}, "loss of own_recipes:vector_of_several"),
        ({"model": "own_recipes:detached_loss"}, "loss of own_recipes:detached_loss"),
        ({"model": "own_recipes:wrong_field"}, "optimizer"),
        ({"model": "own_recipes:no_optimizer"}, "optimizer"),
        ({"model": "own_recipes:no_schedule"}, "schedule"),
    ],
)
def test_a_run_refuses_what_it_cannot_train(tmp_path: Path, values, field: str) -> None:
    small = {} if not values.get("model", "").startswith("own") else {"batch_size": 8}
    with refused(field):
        train(tmp_path, **small | values)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_folder_that_cannot_be_made_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with refused("output"):
        train(tmp_path, output=tmp_path / "file" / "runs")


def test_resuming_with_another_strategy_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    train(tmp_path, strategy="host", checkpoint_every="10")
    (folder,) = (tmp_path / "runs").iterdir()
    settings = (folder / "run.toml").read_text()
    for strategy, more in (
        ("hogbatch", {"workers": "cpu:1"}),
        ("wheel", {"checkpoint_every": "60s"}),
        ("local", {"options": {"sync_every": 9}}),
    ):
        with refused("resume"):
            train(tmp_path, strategy=strategy, resume=folder, **more)
        assert (folder / "run.toml").read_text() == settings


def test_results_that_do_not_fit_on_the_disk_are_written_by_a_resumed_run(tmp_path: Path) -> None:
    """The limit of one megabyte is exceeded by the report, but not by a checkpoint's files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with refused("output") as caught:
            train(tmp_path, checkpoint_every="10")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"--resume {folder}" in caught.value.hint
    assert not (folder / "report.html").exists()
    train(tmp_path, resume=folder)
    assert (folder / "report.html").stat().st_size > 1 << 20


def test_a_command_that_cannot_start_is_an_error() -> None:
    with pytest.raises((OSError, PacelineError)):
        launch(["/never/started"], 1)


@pytest.mark.parametrize("verb", [paceline.train, paceline.rehearse])
def test_a_module_in_place_of_a_recipe_is_refused(verb):
    with refused("model"):
        verb(nn.Sequential(nn.Linear(2, 2)))


def ended(output: Path, error: BaseException, before=lambda folder: None) -> Path:
    """Call `before` in the folder of a run that then raises `error`; return the folder."""

    def run() -> None:
        with run_folder(output, "run", TrainSettings(model="lenet5")) as folder:
            assert (folder / "run.toml").is_file()
            before(folder)
            raise error

    with pytest.raises(type(error)) as raised:
        run()
    assert raised.value is error
    return output / "run"


@pytest.mark.parametrize("error", [paceline.InvalidInput("a", "no"), SystemExit()])
def test_a_run_that_fails_before_its_first_result_leaves_no_folder(tmp_path: Path, error):
    assert not ended(tmp_path, error).exists()


def test_files_that_a_run_has_written_outlive_its_failure(tmp_path: Path):
    folder = ended(tmp_path, RuntimeError(), lambda folder: (folder / "checkpoints").mkdir())
    assert {path.name for path in folder.iterdir()} == {"run.toml", "checkpoints"}


def test_a_removed_folder_does_not_hide_the_error(tmp_path: Path):
    ended(tmp_path, RuntimeError(), shutil.rmtree)


def request_in(output: Path) -> RunRequest:
    settings = TrainSettings(model="lenet5", output=output)
    return RunRequest(verb="train", settings=settings, run_id="mine")


def test_a_run_restarts_from_its_newest_undamaged_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "mine" / CHECKPOINTS, keep=2)
    folder.path.mkdir(parents=True)
    for step in (3, 5):
        written = folder.write(step, {"model/weight": torch.zeros(2)}, {})
    (written / "model.safetensors").write_bytes(b"damaged")
    again = restarted(request_in(tmp_path), "worker 1 was lost")
    assert "step 3" in again.lost[0]
    assert isinstance(again.settings, TrainSettings)
    assert again.settings.resume == tmp_path / "mine"


def test_without_a_checkpoint_a_run_starts_again_in_its_folder(tmp_path: Path) -> None:
    request = request_in(tmp_path)
    again = restarted(request, "worker 1 was lost")
    assert again == request.model_copy(update={"lost": again.lost})
    assert again.lost
