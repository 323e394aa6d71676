"""Optimizers and schedules by name: torch's own, rates by closed forms, and refusals."""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.training.recipes.optimizers import optimizer_of, schedule_of
from refusals import refused

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

def number(*_):
    return 7

def broken(*_):
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

WIDTH = 5

def halved(optimizer, num_steps):
    return torch.optim.lr_scheduler.StepLR(optimizer, num_steps // 2, gamma=0.5)

def plateau(optimizer, num_steps):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
"""


@pytest.fixture
def own(own_modules) -> None:
    own_modules(own_optimizers=OWN)


def matrices() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))]


def known_to_torch() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }


@pytest.mark.parametrize("name", sorted(USABLE))
def test_every_optimizer_of_torch_is_found_in_any_case(name: str):
    kind = known_to_torch()[name]
    made = optimizer_of(name.upper(), 0.01, None)(matrices())
    assert (type(made), made.defaults) == (kind, kind(matrices(), lr=0.01).defaults)
    # Without a rate and a momentum it has torch's defaults.
    assert optimizer_of(name, None, None)(matrices()).defaults == kind(matrices()).defaults


def test_every_optimizer_of_torch_can_be_used_or_is_refused():
    known = known_to_torch().keys() - {"optimizer"}
    for name in (*(known - USABLE), "sgdd", "magic", "", "optimizer"):
        with refused("optimizer"):
            optimizer_of(name, None, None)
    assert {"lbfgs", "sparseadam"} <= known - USABLE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adamw", {"betas": [0.8, 0.95], "weight_decay": 0.1, "eps": 1e-6, "amsgrad": True}),
        ("sgd", {"nesterov": True, "weight_decay": 1}),
        ("adafactor", {"eps": [None, 1e-3], "d": 2}),
        ("muon", {"ns_coefficients": [3.0, -4.0, 2.0], "ns_steps": 3}),
    ],
)
def test_fields_reach_the_optimizer_in_the_types_of_torch(name: str, options: dict[str, Any]):
    momentum = 0.9 if name == "sgd" else None
    made = optimizer_of(name, 0.02, momentum, options)(matrices())
    own = {"lr": 0.02} | ({"momentum": 0.9} if momentum else {})
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    expected = known_to_torch()[name](matrices(), **own, **tuples)
    assert made.defaults == expected.defaults


@pytest.mark.parametrize(
    ("name", "options", "named"),  # the option that the error names, if it is one
    [
        ("adamw", {"weight_decy": 0.1}, ""),
        ("adamw", {"params": []}, ""),
        ("sgd", {"lr": 0.1}, ".lr"),  # a separate setting
        ("sgd", {"momentum": 0.1}, ".momentum"),  # a separate setting, too
        *(("adamw", {"betas": betas}, ".betas") for betas in (0.9, [0.9], [0.9] * 3, [0.9, 1.5])),
        *(("adamw", {"eps": eps}, ".eps") for eps in ("1e-8", -1, float("inf"), float("nan"))),
        ("adamw", {"weight_decay": True}, ".weight_decay"),
        *(("adamw", {"amsgrad": value}, ".amsgrad") for value in ("yes", 1)),
        ("adamw", {"eps": 1e-6, "weight_decay": -0.1}, ".weight_decay"),
        ("muon", {"ns_steps": 2.5}, ".ns_steps"),
        ("sgd", {"nesterov": True}, ".nesterov"),  # without momentum
        ("adamw", {"fused": True, "foreach": True}, ""),  # neither alone is wrong
    ],
)
def test_options_that_an_optimizer_does_not_accept_are_refused(name, options, named):
    with refused(f"optimizer_options{named}"):
        optimizer_of(name, 0.1, 0.0 if name == "sgd" else None, options)


def test_only_optimizers_with_a_momentum_accept_one():
    with refused("momentum"):
        optimizer_of("adam", 0.1, 0.9)
    assert optimizer_of("adam", 0.1, 0.0)(matrices()).defaults["lr"] == 0.1
    assert optimizer_of("rmsprop", 0.1, 0.9)(matrices()).defaults["momentum"] == 0.9
    assert optimizer_of("muon", 0.1, 0.0)(matrices()).defaults["momentum"] == 0


def test_parameters_that_an_optimizer_does_not_accept_are_refused():
    make = optimizer_of("muon", 0.1, None)
    with refused("optimizer"):
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
    ],
)
def test_a_factory_of_a_user_gets_only_the_given_fields(own, name, rate, options, defaults):
    made = optimizer_of(f"own_optimizers:{name}", rate, None, options)(matrices())
    assert {field: made.defaults[field] for field in defaults} == defaults


@pytest.mark.parametrize(
    ("name", "rate", "options", "field"),
    [
        *(
            (f"own_optimizers:{name}", None, {}, "optimizer")
            for name in ("plan", "WIDTH", "number", "broken", "closure")
        ),
        ("own_optimizers:plain", None, {"decay": 1}, "optimizer_options"),
        ("own_optimizers:steady", 0.1, {}, "learning_rate"),
        ("own_optimizers:needs", None, {"width": 1}, "learning_rate"),
        ("own_optimizers:needs", 0.1, {}, "optimizer_options.width"),
    ],
)
def test_a_factory_that_cannot_be_used_is_refused(own, name, rate, options, field):
    with refused(field):
        optimizer_of(name, rate, None, options)(matrices())


RATE = 0.3
NAMES = ("constant", "cosine", "linear")


def sgd() -> torch.optim.Optimizer:
    """Create an optimizer with two groups; the second has twice the rate."""
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))]},
        {"params": [nn.Parameter(torch.zeros(1))], "lr": 2 * RATE},
    ]
    return torch.optim.SGD(groups, lr=RATE)


def expected(name: str, step: int, warmup: int, total: int) -> float:
    """Return the documented rate of a step, counted from 0."""
    if step < warmup:
        return RATE * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return RATE * {"constant": 1.0, "cosine": cosine, "linear": 1 - done}[name]


@given(st.sampled_from(NAMES), st.data())
def test_every_step_has_the_rate_of_the_closed_form(name: str, data: st.DataObject):
    total = data.draw(st.integers(1, 60))
    warmup = data.draw(st.integers(0, total - 1))
    optimizer = sgd()
    schedule = schedule_of(name, warmup)(optimizer, total)
    for step in range(total):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert first == pytest.approx(expected(name, step, warmup, total), abs=1e-15)
        assert second == pytest.approx(2 * first)
        assert first > 0  # every step has an effect
        optimizer.step()
        schedule.step()
    if name != "constant":  # the rate is zero after the last step
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "warmup", "field"),
    [
        *((name, 0, "schedule") for name in ("cosin", "", "own_optimizers:halve")),
        *((f"own_optimizers:{name}", 0, "schedule") for name in ("plateau", "number", "broken")),
        ("own_optimizers:halved", 3, "warmup_steps"),
        ("cosine", 10, "warmup_steps"),
        ("constant", 11, "warmup_steps"),
    ],
)
def test_schedules_are_refused(own, name: str, warmup: int, field: str):
    with refused(field):
        schedule_of(name, warmup)(sgd(), 10)


def test_an_optimizer_that_is_only_like_torchs_has_no_schedule():
    with refused("schedule"):
        schedule_of("cosine", 0)(SimpleNamespace(param_groups=[]), 10)


def test_a_schedule_of_a_user_gets_the_number_of_steps(own):
    optimizer = sgd()
    schedule = schedule_of("own_optimizers:halved", 0)(optimizer, 6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([RATE] * 3 + [RATE / 2] * 3)
