"""What a run refuses once its model and its data are there: by the field, and without a folder."""

import socket
from pathlib import Path

import pytest
import torch

from paceline.core.errors import PacelineError
from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.runs.launching import carry_out, requested
from paceline.runs.session import go_through
from refusals import refused


def train(tmp_path: Path, **values: object) -> None:
    """Go through a training in this process."""
    known = {"model": "lenet5", "workers": 1, "profile_s": 0.02, "epochs": 1}
    request = requested("train", known | {"output": tmp_path / "runs"} | values, quiet=True)
    go_through(request, Group.alone(torch.device("cpu"), 60.0))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"model": "lenet6"}, "model"),
        ({"model": "nowhere:factory"}, "nowhere:factory"),
        ({"model": "torch.nn:ReLU"}, "torch.nn:ReLU"),
        ({"data": "libsvm:none.txt"}, "data"),
        ({"data": "images:none"}, "data"),
        ({"batch_size": 1000}, "batch_size"),  # 2 steps an epoch, of which none is measured
        ({"learning_rate": 1e38}, "learning_rate"),
        ({"model": "own_recipes:tokens", "data": "digits"}, "data"),
        ({"model": "own_recipes:raises"}, "own_recipes:raises"),
        ({"model": "own_recipes:number"}, "own_recipes:number"),
        ({"model": "own_recipes:empty"}, "own_recipes:empty"),
        ({"model": "own_recipes:uneven"}, "own_recipes:uneven"),
        ({"model": "own_recipes:unreadable"}, "own_recipes:unreadable"),
        ({"model": "own_recipes:leaves"}, "own_recipes:leaves"),
        ({"model": "own_recipes:vector_loss"}, "loss of own_recipes:vector_loss"),
        ({"model": "own_recipes:vector_of_several"}, "loss of own_recipes:vector_of_several"),
        ({"model": "own_recipes:detached_loss"}, "loss of own_recipes:detached_loss"),
        ({"model": "own_recipes:untrained"}, "own_recipes:untrained"),
        ({"model": "own_recipes:wrong_field"}, "optimizer"),
        ({"model": "own_recipes:no_optimizer"}, "optimizer"),
        ({"model": "own_recipes:no_schedule"}, "schedule"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
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


def test_more_workers_than_cores_can_carry_are_refused(tmp_path: Path) -> None:
    with refused("workers"):
        carry_out(requested("train", {"model": "lenet5", "workers": 64, "output": tmp_path}))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, refused("port"):
        launch(["never", "started"], 2, taken.getsockname()[1])
    with refused("port"):
        launch(["never", "started"], 2, 2**16)
    with pytest.raises((OSError, PacelineError)):
        launch(["/never/started"], 1)
