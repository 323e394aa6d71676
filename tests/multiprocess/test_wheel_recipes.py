"""Strategy wheel trains any recipe: mappings as samples, any loss; and what is refused."""

import json
from pathlib import Path

import pytest

from launched import PROGRAMS

LANGUAGE = str(PROGRAMS / "language.py")


def ran(start, *arguments: object) -> dict:
    done = start(LANGUAGE, *map(str, arguments)).finish()
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return json.loads(done.out)


def test_a_language_model_trains_as_if_nobody_had_cut_it(start):
    """Bit for bit, in two and a half epochs, with clipped gradients and tests in between."""
    more = {"steps": 25, "clip_norm": 0.5, "evaluate_every": 7}
    found = ran(start, "alone", "double", json.dumps(more))
    assert all(found["same"].values()), found["same"]
    assert found["moved"] > 0.5
    assert found["bytes"] == found["formula"]
    assert found["bytes"]["labels"] == 25 * 12 * (6 * 8 + 6 * 8 + 4 + 8 + 6)  # all of a mapping
    assert found["samples"] == 2 * 120 + 5 * 12
    assert [row[0] for row in found["evaluations"]] == [7, 10, 14, 20, 21, 25]
    assert found["tests"] == 3  # within epochs
    assert [found["evaluations"][i][1] for i in (1, 3, 5)] == found["test_losses"]
    assert found["accuracy"] == [None] * 3
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert (found["faults"], found["lost"], found["steps"]) == ([], [], [25])


def test_bfloat16_is_that_of_autocast_in_one_piece(start):
    found = ran(start, "alone", "single", json.dumps({"steps": 25, "precision": "bfloat16"}))
    assert found["moved"] > 0.5
    assert found["error"] < 1e-3  # of values up to 1: what crosses is rounded as inside
    exact = ran(start, "alone", "single", json.dumps({"steps": 25}))
    assert exact["error"] < 1e-5
    assert exact["losses"] != found["losses"]


def test_bytes_of_a_language_model_are_those_of_the_formula(start):
    found = ran(start, "many", 3, 2)
    assert found["bytes"] == found["formula"]
    assert found["samples"] == 2 * 120
    assert (found["faults"], found["lost"], found["steps"]) == ([], [], [20] * 3)
    assert found["losses"][1] < found["losses"][0]


RECIPES = """
import torch
from torch import nn
from torch.nn import functional as F
from paceline.recipes.recipe import Recipe

pytestmark = pytest.mark.slow

class Data:
    def __init__(self, broken=False, uneven=False):
        self.broken, self.uneven = broken, uneven
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if self.broken and index == 40:
            raise OSError("the disk is gone")
        return torch.ones(4 + (self.uneven and index % 8 == 0)), torch.tensor(index / 64)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 200)
    def forward(self, values):
        return self.last(self.first(values[:, :4])).mean(1)

def squared(outputs, targets):
    return (outputs - targets).square().mean()

def each(outputs, targets):  # a number for a batch of one sample only
    return (outputs - targets).square().squeeze()

def failing(outputs, targets):
    if len(targets) > 2:
        raise ValueError("three is a crowd")
    return squared(outputs, targets)

def made(**more):
    return Recipe(model=Net, **({"train": Data(), "loss": squared} | more))

def not_scalar(): return made(loss=each)
def never_scalar(): return made(loss=lambda outputs, targets: outputs - targets)
def fails(): return made(loss=failing)
def broken(): return made(train=Data(broken=True))
def uneven(): return made(train=Data(uneven=True), collate=padded)

def padded(rows):
    longest = max(len(values) for values, _ in rows)
    inputs = [F.pad(values, (0, longest - len(values))) for values, _ in rows]
    return torch.stack(inputs), torch.stack([target for _, target in rows])
"""
TRAIN = ("--strategy", "wheel", "--set", "head=last", "--profile-s", "0", "--batch-size", "8")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "not_scalar",
            "worker 0, step 0: loss of errant:not_scalar: is float32 4; it must be a scalar",
        ),
        ("never_scalar", "loss of errant:never_scalar: is float32 1; it must be a scalar"),
        (
            "fails",
            "loss of errant:fails: fails on outputs float32 4 and targets float32 4: ValueError",
        ),
        ("broken", "failed: errant:broken: sample 40 of its data cannot be read: OSError"),
        ("uneven", "failed: errant:uneven: a batch has inputs float32 4x4, and the first sample"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_one_line(paceline, tmp_path: Path, recipe, message):
    (tmp_path / "errant.py").write_text(RECIPES)
    done = paceline("train", f"errant:{recipe}", *TRAIN)
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert message in done.err.splitlines()[-1]
