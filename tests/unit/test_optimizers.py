"""Optimizers by name: each is torch's own, and what one does not take is named before a run."""

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.errors import InvalidInput
from paceline.core.settings import TrainSettings
from paceline.recipes.optimizers import optimizer_for, optimizer_of

USABLE = {
    *("adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam"),
    *("radam", "rmsprop", "rprop", "sgd"),
}
OWN = """
import torch

def plain(parameters, lr=0.5, weight_decay=0.0):
    return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)

def anything(parameters, **fields):
    return torch.optim.AdamW(parameters, **fields)

def loose(parameters, *others, lr=0.125):
    return torch.optim.SGD(parameters, lr=lr)

def steady(parameters):
    return torch.optim.SGD(parameters, lr=0.25)

def needs(parameters, lr, width):
    return torch.optim.SGD(parameters, lr=lr)

def number(parameters):
    return 7

def broken(parameters):
    raise RuntimeError("first line\\nsecond line")

def closure(parameters):
    return torch.optim.LBFGS(parameters)

class Half(torch.optim.SGD):
    def __init__(self, params, lr=1.0, betas=(0.5, 0.5)):
        assert isinstance(betas, tuple)
        super().__init__(params, lr=lr / 2)

class Alike:
    def __init__(self, parameters):
        self.param_groups, self.defaults = [{"params": list(parameters)}], {"alike": True}

    def step(self):
        pass

    def zero_grad(self):
        pass

class Family:
    half = Half

WIDTH = 5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's module in the current directory, which leaves no trace in this process."""
    (tmp_path / "own_optimizers.py").write_text(OWN)
    (tmp_path / "own_failing.py").write_text("raise ValueError('no good')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for module in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[module]


def matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))]


def after_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> torch.Tensor:
    """Return the parameters after three steps with gradients that are the same for everybody."""
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1)) * parameter.detach()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def known_to_torch() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }


@pytest.mark.parametrize("name", sorted(USABLE))
def test_every_optimizer_of_torch_is_found_in_any_case_and_takes_torchs_steps(name: str):
    kind = known_to_torch()[name]
    ours, theirs = matrices(), matrices()
    made = optimizer_of(name.upper(), 0.01, None)(ours)
    assert type(made) is kind
    assert torch.equal(after_steps(made, ours), after_steps(kind(theirs, lr=0.01), theirs))


def test_every_optimizer_of_torch_can_be_used_or_is_refused_with_the_reason():
    known = known_to_torch().keys() - {"optimizer"}
    for name in known - USABLE:
        with pytest.raises(InvalidInput, match=f"^optimizer: {name!r} is not one that can be") as e:
            optimizer_of(name, None, None)
        assert "closure" in str(e.value) or "sparse gradients" in str(e.value)
    assert {"lbfgs", "sparseadam"} <= known - USABLE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"betas": [0.8, 0.95], "weight_decay": 0.1, "eps": 1e-6, "amsgrad": True}),
        ("sgd", {"nesterov": True, "weight_decay": 1}),
        ("adafactor", {"eps": [None, 1e-3], "d": 2}),
        ("rprop", {"etas": [0.4, 1.3], "step_sizes": [1e-5, 10]}),
        ("muon", {"ns_coefficients": [3.0, -4.0, 2.0], "ns_steps": 3}),
        ("adam", {"foreach": False, "maximize": True}),
    ],
)
def test_fields_reach_the_optimizer_as_torch_takes_them(name: str, options: dict[str, Any]):
    momentum = 0.9 if name == "sgd" else None
    made = optimizer_of(name, 0.02, momentum, options)(matrices())
    own = {"lr": 0.02} | ({"momentum": 0.9} if momentum else {})
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    expected = known_to_torch()[name](matrices(), **own, **tuples)
    assert made.defaults == expected.defaults
    for field, value in tuples.items():
        assert made.defaults.get(field, value) == value


@pytest.mark.parametrize("name", sorted(USABLE))
def test_a_rate_and_a_momentum_of_none_are_the_optimizers_own(name: str):
    made = optimizer_of(name, None, None)(matrices())
    assert made.defaults == known_to_torch()[name](matrices()).defaults


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgdd", {}, r"^optimizer: 'sgdd' is not one .*; did you mean 'sgd'\? Known are adad"),
        ("magic", {}, r"^optimizer: 'magic' is not one that can be used\. Known are .*, and your "),
        ("", {}, "^optimizer: '' is not one"),
        ("optimizer", {}, "^optimizer: 'optimizer' is not one"),
        (
            "adamw",
            {"weight_decy": 0.1},
            "^optimizer_options: 'weight_decy' is no field of adamw; did you mean 'weight_decay'. "
            "Known are betas, eps, weight_decay, ",
        ),
        ("adamw", {"params": []}, "'params' is no field of adamw"),
        ("sgd", {"lr": 0.1}, "^optimizer_options: lr is a setting of its own: learning_rate$"),
        ("sgd", {"momentum": 0.1}, "optimizer_options: momentum is a setting of its own: momentum"),
        ("adamw", {"betas": 0.9}, "^optimizer_options: betas of adamw: .*tuple, not 0.9$"),
        ("adamw", {"betas": [0.9]}, r"^optimizer_options: betas of adamw: .*, not \(0.9,\)$"),
        ("adamw", {"betas": [0.9, 0.9, 0.9]}, "^optimizer_options: betas of adamw: "),
        ("adamw", {"betas": [0.9, 1.5]}, "^optimizer_options: betas of adamw: Invalid beta par"),
        ("adamw", {"eps": "1e-8"}, "^optimizer_options: eps of adamw: .*number, not '1e-8'$"),
        ("adamw", {"eps": -1}, "^optimizer_options: eps of adamw: Invalid epsilon value: -1$"),
        ("adamw", {"eps": float("inf")}, "^optimizer_options: eps of adamw: .*finite.*, not inf$"),
        ("adamw", {"eps": float("nan")}, "^optimizer_options: eps of adamw: .*, not nan$"),
        ("adamw", {"weight_decay": True}, "^optimizer_options: weight_decay of adamw: "),
        ("adamw", {"amsgrad": "yes"}, "^optimizer_options: amsgrad of adamw: .*, not 'yes'$"),
        ("adamw", {"amsgrad": 1}, "^optimizer_options: amsgrad of adamw: .*, not 1$"),
        ("adamw", {"eps": 1e-6, "weight_decay": -0.1}, "^optimizer_options: weight_decay of adamw"),
        ("muon", {"ns_steps": 2.5}, "^optimizer_options: ns_steps of muon: .*integer, not 2.5$"),
        # Neither is wrong by itself.
        (
            "adamw",
            {"fused": True, "foreach": True},
            "^optimizer_options: fused, foreach of adamw: `fused` and `foreach` cannot be `True`",
        ),
    ],
)
def test_what_an_optimizer_does_not_take_is_named_in_one_line(name, options, message):
    with pytest.raises(InvalidInput, match=message) as error:
        optimizer_of(name, 0.1, None, options)
    assert "\n" not in str(error.value)


def test_nesterov_needs_the_momentum_that_is_a_setting():
    with pytest.raises(InvalidInput, match="nesterov of sgd: Nesterov momentum requires a mom"):
        optimizer_of("sgd", 0.1, 0.0, {"nesterov": True})
    made = optimizer_of("sgd", 0.1, 0.9, {"nesterov": True})(matrices())
    assert (made.defaults["nesterov"], made.defaults["momentum"]) == (True, 0.9)


def test_a_momentum_is_for_those_that_have_one():
    with pytest.raises(InvalidInput, match=r"^momentum: optimizer adam has none; leave it at 0$"):
        optimizer_of("adam", 0.1, 0.9)
    assert optimizer_of("adam", 0.1, 0.0)(matrices()).defaults["lr"] == 0.1
    assert optimizer_of("rmsprop", 0.1, 0.9)(matrices()).defaults["momentum"] == 0.9
    assert optimizer_of("muon", 0.1, 0.0)(matrices()).defaults["momentum"] == 0


def test_parameters_that_an_optimizer_does_not_take_are_said_when_it_gets_them():
    make = optimizer_of("muon", 0.1, None)
    with pytest.raises(InvalidInput, match=r"^optimizer: muon: ValueError: Muon only supports 2D"):
        make([nn.Parameter(torch.zeros(3))])


@pytest.mark.parametrize(
    ("name", "rate", "options", "defaults"),
    [
        ("plain", None, {}, {"lr": 0.5, "weight_decay": 0.0}),
        ("plain", 0.1, {"weight_decay": 0.2}, {"lr": 0.1, "weight_decay": 0.2}),
        ("anything", 0.1, {"eps": 1e-3}, {"lr": 0.1, "eps": 1e-3}),
        ("steady", None, {}, {"lr": 0.25}),
        ("Half", 1.0, {"betas": [0.1, 0.2]}, {"lr": 0.5}),
        ("loose", None, {}, {"lr": 0.125}),
        ("Alike", None, {}, {"alike": True}),
        ("Family.half", None, {}, {"lr": 0.5}),
    ],
)
def test_a_factory_of_ones_own_gets_the_fields_that_are_given(own, name, rate, options, defaults):
    made = optimizer_of(f"own_optimizers:{name}", rate, None, options)(matrices())
    assert {field: made.defaults[field] for field in defaults} == defaults


@pytest.mark.parametrize(
    ("name", "rate", "options", "message"),
    [
        ("own_nowhere:a", None, {}, "^optimizer: 'own_nowhere:a' cannot be imported: ModuleNotFo"),
        ("own_failing:a", None, {}, "^optimizer: 'own_failing:a' cannot be .*: ValueError: no goo"),
        ("own_optimizers:plan", None, {}, "the module has no 'plan'; did you mean 'plain'"),
        ("own_optimizers:WIDTH", None, {}, "'own_optimizers:WIDTH' is nothing that can be called"),
        ("own_optimizers:", None, {}, "is not of the form package.module:factory"),
        (":plain", None, {}, "is not of the form package.module:factory"),
        ("own_optimizers:plain", None, {"decay": 1}, "'decay' is no field of own_optimizers:plain"),
        ("own_optimizers:steady", 0.1, {}, "^learning_rate: optimizer own_optimizers:steady has n"),
        ("own_optimizers:needs", None, {"width": 1}, "^learning_rate: .* no default for it; give"),
        ("own_optimizers:needs", 0.1, {}, "^optimizer_options: width: .* no default for it; give"),
        (
            "own_optimizers:number",
            None,
            {},
            "returned int, which has no param_groups, step, zero_g",
        ),
        ("own_optimizers:broken", None, {}, "^optimizer: own_.*: RuntimeError: first line$"),
        ("own_optimizers:closure", None, {}, "it computes the loss several times in a step"),
    ],
)
def test_a_factory_that_cannot_be_used_is_named_in_one_line(own, name, rate, options, message):
    with pytest.raises(InvalidInput, match=message) as error:
        optimizer_of(name, rate, None, options)(matrices())
    assert "\n" not in str(error.value)


def test_settings_without_an_optimizer_have_that_of_the_model():
    image = optimizer_for(TrainSettings(model="alexnet"))(matrices())
    assert type(image) is torch.optim.SGD
    assert (image.defaults["lr"], image.defaults["momentum"]) == (0.001, 0.9)
    text = optimizer_for(TrainSettings(model="gpt", optimizer_options={"weight_decay": 0.3}))
    made = text(matrices())
    assert type(made) is torch.optim.AdamW
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (1e-3, 0.3)
