"""Schedules: the rate of every step by its closed form, and by torch's own schedulers."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.recipes.schedules import schedule_of
from refusals import refused

RATE = 0.3
NAMES = ("constant", "cosine", "linear")
OWN = """
import torch

def halved(optimizer, num_steps):
    return torch.optim.lr_scheduler.StepLR(optimizer, num_steps // 2, gamma=0.5)

def plateau(optimizer, num_steps):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

def number(optimizer, num_steps):
    return num_steps

def broken(optimizer, num_steps):
    raise RuntimeError("first line\\nsecond line")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_schedules.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("own_schedules", None)


def sgd() -> torch.optim.Optimizer:
    """An optimizer of two groups, the second with twice the rate."""
    groups = [
        {"params": [nn.Parameter(torch.zeros(1))]},
        {"params": [nn.Parameter(torch.zeros(1))], "lr": 2 * RATE},
    ]
    return torch.optim.SGD(groups, lr=RATE)


def expected(name: str, step: int, warmup: int, total: int) -> float:
    """The rate of a step, counted from 0, as the documentation states it."""
    if step < warmup:
        return RATE * (step + 1) / warmup
    done = (step - warmup) / (total - warmup)
    return (
        RATE
        * {
            "constant": 1.0,
            "cosine": 0.5 * (1 + math.cos(math.pi * done)),
            "linear": 1 - done,
        }[name]
    )


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
        assert first > 0  # no step is wasted
        optimizer.step()
        schedule.step()
    if name != "constant":  # and after the last one nothing is left
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-15)


@given(st.sampled_from(NAMES), st.data())
def test_a_resumed_schedule_needs_the_number_of_steps_alone(name: str, data: st.DataObject):
    total = data.draw(st.integers(2, 40))
    warmup, done = data.draw(st.integers(0, total - 1)), data.draw(st.integers(0, total - 1))
    optimizer = sgd()
    whole = schedule_of(name, warmup)(optimizer, total)
    for _ in range(done):
        optimizer.step()
        whole.step()
    other = sgd()
    resumed = schedule_of(name, warmup)(other, total)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for mine, its in zip(optimizer.param_groups, other.param_groups, strict=True):
        its["lr"] = mine["lr"]  # a checkpoint of the optimizer has it
    for _ in range(total - done):
        assert [group["lr"] for group in other.param_groups] == [
            group["lr"] for group in optimizer.param_groups
        ]
        for one, its_schedule in ((optimizer, whole), (other, resumed)):
            one.step()
            its_schedule.step()


@pytest.mark.parametrize(
    ("name", "warmup", "field"),
    [
        *((name, 0, "schedule") for name in ("cosin", "", "own_schedules:halve")),
        *((f"own_schedules:{name}", 0, "schedule") for name in ("plateau", "number", "broken")),
        ("own_schedules:halved", 3, "warmup_steps"),
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


def test_a_schedule_of_ones_own_is_told_of_the_steps(own):
    optimizer = sgd()
    schedule = schedule_of("own_schedules:halved", 0)(optimizer, 6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([RATE] * 3 + [RATE / 2] * 3)
