"""`find`: built-in names, perceptrons by their widths, and the user's own factories."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.core.defaults import usual_for
from paceline.core.errors import InvalidInput
from paceline.models import find, names
from paceline.models.networks import MLP, LeNet5

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
    ("name", "message"),
    [
        ("alexnte", r"no model is called 'alexnte'; did you mean 'alexnet'\?"),
        ("AlexNet", r"did you mean 'alexnet'\?"),
        ("transformer-xxl", r"Known are lenet5, alexnet, .*package\.module:factory"),
        ("", "no model is called ''"),
        ("mlp-5", "at least two widths, all positive, not '5'"),
        ("mlp-5-0-2", "not '5-0-2'"),
        ("mlp-5-x", "no model is called 'mlp-5-x'"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        find(name)


def test_a_model_has_at_least_one_class() -> None:
    with pytest.raises(InvalidInput, match="at least 1 class, not 0"):
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
        name,
        None,
        None,
    )
    assert architecture.build(None)(torch.zeros(2, 4)).shape == (2, 3)


def test_factory_of_an_installed_package() -> None:
    model = find("paceline.models.networks:LeNet5").build(None)
    assert isinstance(model, nn.Module)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_model:Tiny", "there is no module 'own_model' in "),
        ("own_package.net:Tiny", "there is no module 'own_package.net' in "),
        ("nowhere.at.all:Tiny", "there is no module 'nowhere' in "),
        ("own_missing:Tiny", "importing 'own_missing' failed: .*No module named 'a_package_that"),
        ("own_broken:Tiny", "importing 'own_broken' failed: ValueError: no good"),
        ("own_script:Tiny", "importing 'own_script' failed: SystemExit: 2"),
        ("own_syntax:Tiny", "importing 'own_syntax' failed: SyntaxError: "),
        ("own_models:Tyny", r"the module has no attribute 'Tyny'; did you mean 'Tiny'\?"),
        ("own_models:Family.large", "no attribute 'Family.large'"),
        ("own_models:WIDTH", "WIDTH is of type int; it must be a function or class"),
        ("own_models:made", "made is of type Tiny; it must be a function or class"),
        (":Tiny", "':Tiny' is not of the form package.module:factory"),
        ("own_models:", "is not of the form"),
        ("own_models:Tiny:x", "is not of the form"),
        ("./own_models.py:Tiny", "is not of the form"),
    ],
)
def test_factories_that_cannot_be_found(folder: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        find(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "own_models:broken",
            r"calling it failed: RuntimeError: first line \(at own_models\.py:\d+\)$",
        ),
        ("own_models:needs", "calling it failed: TypeError: .*missing 1 required"),
        ("own_models:leaves", "calling it failed: SystemExit: 3"),
        ("own_models:number", "returned int, not a torch.nn.Module"),
        ("own_models:frozen", "no trainable parameters"),
        ("own_models:empty", "no trainable parameters"),
    ],
)
def test_factories_that_make_no_model(folder: Path, name: str, message: str) -> None:
    architecture = find(name)
    with pytest.raises(InvalidInput, match=f"{name}: .*{message}"):
        architecture.build(None)


def test_own_factory_has_its_own_number_of_classes(folder: Path) -> None:
    assert find("own_models:tiny").build(10)(torch.zeros(2, 4)).shape == (2, 3)


def test_importing_the_models_starts_no_device_and_no_thread() -> None:
    code = (
        "import threading, paceline.models, torch\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
