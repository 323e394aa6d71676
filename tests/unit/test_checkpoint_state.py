"""States of modules, schedules and random generators, saved to and loaded from checkpoints."""

import copy
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from checkpointed import through_files
from paceline.checkpoints.state import (
    load_module_state,
    load_optimizer_state,
    load_schedule_state,
    module_state,
    optimizer_state,
    random_state,
    restore_random_state,
    schedule_state,
)
from refusals import refused

CPU = torch.device("cpu")

# Modules


class Odd(nn.Module):
    """Has tied weights, running means, (non-)persistent buffers and a channels_last weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.a = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.b = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.b.weight = self.a.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("also_seen", self.seen)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_a_loaded_module_has_the_same_bits_and_stays_tied():
    torch.manual_seed(1)
    model, other = Odd(), Odd()
    model.seen.fill_(7)
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.a.weight[0, 0] = torch.nan
    weight = other.a.weight
    tensors, _ = through_files(module_state(model), {})
    assert not {"b.weight", "also_seen", "scratch"} & tensors.keys()
    load_module_state(other, tensors)
    for name, expected in model.state_dict().items():
        found = other.state_dict()[name]
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        assert torch.equal(found.nan_to_num(9), expected.nan_to_num(9)), name
    assert other.b.weight is other.a.weight is weight
    assert other.also_seen is other.seen


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Linear(3, 4), ["'bias'", "2 float32", "4 float32", "'weight'", "2x3", "4x3"]),
        (nn.Linear(3, 2).double(), ["'bias'", "2 float32", "2 float64", "'weight'"]),
        (nn.Linear(3, 2, bias=False), ["'bias'"]),
        (
            nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)),
            ["'0.bias'", "'0.weight'", "'1.bias'", " 3 more"],
        ),
    ],
)
def test_another_model_is_refused_with_the_differences_and_unchanged(model, named) -> None:
    before = copy.deepcopy(model.state_dict())
    with refused("model") as caught:
        load_module_state(model, module_state(nn.Linear(3, 2)))
    assert all(one in caught.value.problem for one in named), caught.value
    assert "'1.weight'" not in caught.value.problem  # three differences are shown
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


class Counting(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"count": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Ignore the state."""


@pytest.mark.parametrize(
    ("model", "field"),
    [
        (nn.Sequential(Counting()), "0._extra_state"),
        (nn.LazyLinear(3), "weight"),
        (nn.Linear(2, 2, dtype=torch.complex64), "weight"),
    ],
)
def test_module_states_that_cannot_be_saved_are_refused(model: nn.Module, field: str) -> None:
    with refused(field):
        module_state(model)


def test_state_dict_hooks_of_a_module_run():
    """Hooks may rename entries of the state, as wrappers of layers do."""

    def outwards(module: nn.Module, state: dict, prefix: str, meta: dict) -> None:
        state["inner." + prefix + "weight"] = state.pop(prefix + "weight")

    def inwards(module: nn.Module, state: dict, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state.pop("inner." + prefix + "weight")

    model, other = (nn.Linear(3, 3, bias=False) for _ in range(2))
    for one in (model, other):
        one._register_state_dict_hook(outwards)
        one.register_load_state_dict_pre_hook(inwards)
    tensors = module_state(model)
    assert list(tensors) == ["inner.weight"]
    load_module_state(other, tensors)
    assert torch.equal(other.weight, model.weight)


# Schedules


def sequential(optimizer: Any) -> lr_scheduler.LRScheduler:
    parts = [
        lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
        lr_scheduler.CosineAnnealingLR(optimizer, 9),
    ]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


SCHEDULES: dict[str, Callable[[Any], lr_scheduler.LRScheduler]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8]),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
}


def rates(scheduler: Any, optimizer: Any, num_steps: int) -> list[Any]:
    found = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        found.append([(group["lr"], group.get("momentum")) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("saved_at", [0, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_where_it_was(name: str, saved_at: int):
    model = nn.Linear(2, 2)

    def make() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CyclicLR warns that it sets momentum
            return optimizer, SCHEDULES[name](optimizer)

    optimizer, scheduler = make()
    rates(scheduler, optimizer, saved_at)
    tensors, values = optimizer_state(optimizer, model.named_parameters())
    tensors, values = through_files(tensors, [values, schedule_state(scheduler)])
    before = copy.deepcopy(values[1])
    other, resumed = make()
    load_optimizer_state(other, model.named_parameters(), tensors, values[0])
    load_schedule_state(resumed, values[1])
    assert resumed.get_last_lr() == scheduler.get_last_lr()
    expected = rates(scheduler, optimizer, 15 - saved_at)
    assert rates(resumed, other, 15 - saved_at) == expected
    assert values[1] == before


def test_another_schedule_is_refused() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
    state, own = schedule_state(sequential(optimizer)), sequential(optimizer)
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.StepLR(optimizer, 3)]
    with refused("schedule") as caught:
        load_schedule_state(lr_scheduler.SequentialLR(optimizer, parts, [3]), state)
    assert "CosineAnnealingLR" in caught.value.problem
    before = repr(own.state_dict())
    for broken in (None, {}, {"kind": "StepLR", "state": 3}):
        with refused("schedule"):
            load_schedule_state(own, broken)
    assert repr(own.state_dict()) == before


def test_a_schedule_with_tensors_is_refused_by_name():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), torch.tensor(0.1))
    with refused("StepLR.base_lrs[0]"):
        schedule_state(lr_scheduler.StepLR(optimizer, 3))


# Random numbers


def drawn() -> tuple[Any, ...]:
    return (
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        [random.random(), random.gauss(0, 1)],
        [np.random.rand(), np.random.randn()],
    )


def test_loaded_random_states_continue_the_sequences():
    before = random_state(CPU)
    drawn()  # after an odd number of normal values, the state holds half of a pair
    tensors, values = through_files(*random_state(CPU))
    expected = [drawn() for _ in range(3)]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    restore_random_state(CPU, tensors, values)
    assert [drawn() for _ in range(3)] == expected
    restore_random_state(CPU, *before)


def test_an_invalid_random_state_is_refused() -> None:
    tensors, values = random_state(CPU)
    for broken, fields in (
        ({"torch": tensors["torch"]}, values),
        (tensors, {}),
        (tensors, values | {"numpy": {}}),
        (tensors | {"torch": tensors["torch"] * 0}, values),
        (tensors | {"python": -tensors["python"]}, values),
    ):
        with refused("random"):
            restore_random_state(CPU, broken, fields)
    restore_random_state(CPU, tensors, values)


def test_a_random_state_of_another_device_causes_a_warning(caplog: pytest.LogCaptureFixture):
    tensors, values = random_state(CPU)
    expected = drawn()
    with caplog.at_level(logging.WARNING):
        restore_random_state(CPU, tensors | {"device": torch.zeros(16)}, values)
    (warning,) = caplog.records
    assert warning.args[0] == CPU
    assert drawn() == expected


def test_other_generators_of_numpy_are_refused():
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        with refused("numpy"):
            random_state(CPU)
    finally:
        np.random.set_bit_generator(before)
