"""`find`: built-in names, perceptrons by their widths, and the user's own factories."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.core.defaults import usual_for
from paceline.models import find, names
from paceline.models.networks import MLP, LeNet5
from refusals import refused

OWN = """
import torch
from torch import nn

class Tiny(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))

class Family:
    @staticmethod
    def small():
        return Tiny()

def tiny():
    return Tiny()

def frozen():
    return Tiny().requires_grad_(False)

def empty():
    return nn.ReLU()

def number():
    return 7

def broken():
    raise RuntimeError("first line\\nsecond line")

def needs(width):
    return Tiny()

def leaves():
    raise SystemExit(3)

WIDTH = 5
made = Tiny()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with the user's modules, which leave no trace in this process."""
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import torch\nraise ValueError('no good')\n")
    (tmp_path / "own_missing.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "own_script.py").write_text("import sys\nsys.exit(2)\n")
    (tmp_path / "own_syntax.py").write_text("def f(:\n")
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for module in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[module]


def test_names_are_the_documented_ones() -> None:
    assert set(names()) == {
        *("lenet5", "alexnet", "vgg16", "googlenet", "inception-v3", "mlp"),
        *("resnet18", "resnet50", "resnet101", "resnet110", "resnet152"),
        *("covtype-mlp", "w8a-mlp", "delicious-mlp", "real-sim-mlp"),
        *("gpt", "gpt-1m", "gpt-10m", "gpt-30m", "gpt2", "bert", "bert-base"),
        *("bert-large", "vit", "vit-b-16"),
        *("gpt-untied", "gpt-1m-untied", "gpt-10m-untied", "gpt-30m-untied", "gpt2-untied"),
    }


def test_built_in_architecture() -> None:
    architecture = find("lenet5")
    assert architecture.name == "lenet5"
    assert architecture.input_shape == (1, 32, 32)
    assert architecture.num_classes == 10
    model = architecture.build(3)
    assert isinstance(model, LeNet5)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "dtype", "data"),
    [
        ("lenet5", torch.float32, "digits"),
        ("mlp-4-3", torch.float32, "digits"),
        ("vit", torch.float32, "digits"),
        ("gpt", torch.int64, "text"),
        ("gpt2-untied", torch.int64, "text"),
        ("bert", torch.int64, "masked-text"),
    ],
)
def test_architecture_says_what_a_sample_is(name: str, dtype: torch.dtype, data: str) -> None:
    assert (find(name).input_dtype, usual_for(name).data) == (dtype, data)


def test_each_build_is_a_new_model() -> None:
    architecture = find("mlp-4-3")
    one, other = architecture.build(None), architecture.build(None)
    assert next(one.parameters()) is not next(other.parameters())


def test_perceptron_by_its_widths() -> None:
    architecture = find("mlp-300-512-2")
    assert architecture.input_shape == (300,)
    assert architecture.num_classes == 2
    shapes = [tuple(p.shape) for p in architecture.build(5).parameters() if p.dim() == 2]
    assert shapes == [(512, 300), (5, 512)]
    assert isinstance(find("mlp").build(None), MLP)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("alexnte", "'alexnet'"),
        ("AlexNet", "'alexnet'"),
        ("transformer-xxl", "lenet5"),
        ("", "lenet5"),
        ("mlp-5", ""),
        ("mlp-5-0-2", ""),
        ("mlp-5-x", ""),
    ],
)
def test_unknown_names(name: str, nearest: str) -> None:
    with refused("model") as caught:
        find(name)
    assert nearest in caught.value.problem


def test_a_model_has_at_least_one_class() -> None:
    with refused("num_classes", got=0):
        find("lenet5").build(0)


@pytest.mark.parametrize(
    "name",
    [
        *("own_models:Tiny", "own_models:tiny", "own_models:Family.small"),
        *("own_package.nets:Tiny", "own_package.nets:tiny"),
    ],
)
def test_own_factory_in_the_current_directory(folder: Path, name: str) -> None:
    architecture = find(name)
    assert (architecture.name, architecture.input_shape, architecture.num_classes) == (
        *(name, None, None),
    )
    assert architecture.build(None)(torch.zeros(2, 4)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("own_model:Tiny", "'own_model'"),
        ("own_package.net:Tiny", "'own_package.net'"),
        ("nowhere.at.all:Tiny", "'nowhere'"),
        ("own_missing:Tiny", "a_package_that_nobody_has"),
        ("own_broken:Tiny", "ValueError: no good"),
        ("own_script:Tiny", "SystemExit: 2"),
        ("own_syntax:Tiny", "SyntaxError: "),
        ("own_models:Tyny", "'Tiny'"),
        ("own_models:Family.large", "'Family.large'"),
        ("own_models:WIDTH", " int"),
        ("own_models:made", " Tiny"),
    ],
)
def test_factories_that_cannot_be_found(folder: Path, name: str, cause: str) -> None:
    with refused(name) as caught:
        find(name)
    assert cause in caught.value.problem


@pytest.mark.parametrize(
    "name", [":Tiny", "own_models:", "own_models:Tiny:x", "./own_models.py:Tiny"]
)
def test_names_of_factories_have_a_form(name: str) -> None:
    with refused("model"):
        find(name)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("broken", "RuntimeError: first line (at own_models.py:"),
        ("needs", "TypeError: "),
        ("leaves", "SystemExit: 3"),
        ("number", " int"),
        ("frozen", "parameters"),
        ("empty", "parameters"),
    ],
)
def test_factories_that_make_no_model(folder: Path, name: str, cause: str) -> None:
    architecture = find(f"own_models:{name}")
    with refused(f"own_models:{name}") as caught:
        architecture.build(None)
    assert cause in caught.value.problem


def test_own_factory_has_its_own_number_of_classes(folder: Path) -> None:
    assert find("own_models:tiny").build(10)(torch.zeros(2, 4)).shape == (2, 3)
