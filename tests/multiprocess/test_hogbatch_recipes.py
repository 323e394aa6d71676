"""Recipes of the user's own on uneven workers, from the command line: good ones and bad ones."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAIN = ("--strategy", "hogbatch", "--workers", "cpu:1,cpu:1", "--profile-s", "0.1", "--force")
RECIPES = '''
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, TensorDataset

from paceline.recipes.recipe import Recipe


class Text(Dataset):
    """Tokens, of which each is followed by the next number."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        ids = (torch.arange(9) + index) % 13
        return {"ids": ids[:-1], "mask": torch.ones(8), "labels": ids[1:]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(13, 16), nn.Dropout(0.1)
        self.head = nn.Linear(16, 13)

    def forward(self, ids, mask, labels):
        return self.head(self.dropout(self.embedding(ids)) * mask[..., None])


def next_token(outputs, batch):
    return cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def right_tokens(outputs, batch):
    return (outputs.argmax(-1) == batch["labels"]).double().mean()


def text():
    return Recipe(
        model=Net, train=Text(300), test=Text(40), loss=next_token, score=right_tokens
    )


class Broken(Dataset):
    def __init__(self, wide):
        self.wide = wide

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index == 150 and not self.wide:
            raise OSError("disk on fire")
        return torch.zeros(4 if index == 150 else 3), 1


def made(**changes):
    right = dict(
        model=lambda: nn.Linear(3, 2),
        train=TensorDataset(torch.randn(200, 3), torch.zeros(200, dtype=torch.int64)),
        loss=cross_entropy,
    )
    return Recipe(**right | changes)


def raising():
    return made(train=Broken(False))


def unequal():
    return made(train=Broken(True))


def vector():
    return made(loss=lambda outputs, targets: cross_entropy(outputs, targets, reduction="none"))


def sometimes_vector():
    return made(
        loss=lambda outputs, targets: cross_entropy(outputs, targets, reduction="none").squeeze()
    )


def of_other_outputs():
    return made(loss=lambda outputs, targets: mse_loss(outputs["logits"], targets))


def too_large():
    targets = torch.zeros(200, dtype=torch.int64)
    targets[150] = 2
    return made(train=TensorDataset(torch.randn(200, 3), targets))


def constant():
    return made(loss=lambda outputs, targets: torch.tensor(1.0))


def without_tests():
    return made(train=TensorDataset(torch.randn(200, 3), torch.randn(200, 2)), loss=mse_loss)
'''


@pytest.fixture
def recipes(tmp_path: Path) -> None:
    (tmp_path / "recipes.py").write_text(RECIPES)


def test_a_recipe_of_tokens_learns(recipes, paceline):
    how = ("--epochs", "6", "--clip-norm", "5", "--precision", "bfloat16")
    done = paceline("train", "recipes:text", *TRAIN, *how, "--learning-rate", "0.3", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["score"] == "right tokens"
    assert result["epochs"][-1]["score"] > 0.9
    assert result["tokens_per_s"] == pytest.approx(8 * result["samples_per_s"])
    assert sum(row["samples"] for row in result["workers"]) == 6 * 300
    assert (result["faults"], result["lost"]) == ([], [])
    assert result["epochs"][-1]["test_loss"] < result["epochs"][0]["test_loss"]


def test_a_recipe_without_tests_and_without_a_score_is_trained(recipes, paceline):
    how = ("--steps", "6", "--batch-size", "50")
    done = paceline("train", "recipes:without_tests", *TRAIN, *how, "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert [one["test_loss"] for one in result["epochs"]] == [None, None]
    assert sum(row["samples"] for row in result["workers"]) == 300


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "raising",
            "recipes:raising: sample 150 of its data cannot be read: OSError: disk on fire",
        ),
        ("unequal", "cannot be made a batch: "),
        ("sometimes_vector", "loss of recipes:sometimes_vector: is float32 "),
        ("too_large", "loss of recipes:too_large: fails on outputs float32 "),
        ("constant", "loss of recipes:constant: does not depend on the model's parameters"),
    ],
)
def test_what_only_a_worker_finds_wrong_is_one_line_that_names_it(
    recipes, paceline, recipe: str, message: str
):
    done = paceline("train", f"recipes:{recipe}", *TRAIN)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert line.startswith("paceline: worker ")
    assert "(cpu:1, process " in line
    assert message in line
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("vector", "loss of recipes:vector: is float32 1; it must be a scalar"),
        ("of_other_outputs", "loss of recipes:of_other_outputs: fails on outputs float32 1x2"),
    ],
)
def test_what_the_first_sample_shows_is_said_before_workers_start(
    recipes, paceline, recipe: str, message: str
):
    done = paceline("train", f"recipes:{recipe}", *TRAIN)
    assert done.code == 2, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("paceline: ")]
    assert message in line
