"""Optimizer states, saved to and loaded from checkpoint files."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from checkpointed import through_files
from paceline.checkpoints.state import (
    load_module_state,
    load_optimizer_state,
    module_state,
    optimizer_state,
)
from refusals import refused

OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if kind not in (torch.optim.Optimizer, torch.optim.LBFGS)
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "fused": True}],
    "Adam": [{}, {"amsgrad": True}, {"fused": True}, {"fused": True, "amsgrad": True}],
    "AdamW": [{"amsgrad": True}, {"betas": (0.8, 0.9), "fused": True}],
    "Adagrad": [{}, {"fused": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
CASES = [
    (name, options, dtype)
    for name in OPTIMIZERS
    for given in OPTIONS.get(name, [{}])
    for options in ([given] if "fused" in given else [given | {"foreach": True}, given])
    if "foreach" not in options or "foreach" in inspect.signature(OPTIMIZERS[name]).parameters
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    # Its rounding depends on the memory address of the momentum, so equal runs differ.
    if not (name == "SGD" and "fused" in options and dtype == torch.bfloat16)
]


def small(name: str, dtype: torch.dtype) -> nn.Module:
    """Return a model with several shapes, a channels_last weight and an unused layer."""
    torch.manual_seed(3)
    if name == "Muon":  # requires matrices
        model: nn.Module = nn.Sequential(nn.Linear(5, 6, bias=False), nn.Linear(6, 4, bias=False))
    elif name == "SparseAdam":
        model = nn.Embedding(7, 3, sparse=True)
    else:
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 2))
        model[0].to(memory_format=torch.channels_last)
        model.unused = nn.Linear(2, 2)
    return model.to(dtype)


def step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    shape = {"Muon": (8, 5), "SparseAdam": (8,)}.get(name, (8, 3, 2, 2))
    inputs = torch.rand(shape, generator=generator).to(dtype)
    if name == "SparseAdam":
        inputs = torch.randint(0, 7, (8,), generator=generator)
    optimizer.zero_grad()
    model(inputs).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_a_loaded_optimizer_takes_the_same_steps_as_the_saved_one(
    name: str, options: dict[str, Any], dtype: torch.dtype
):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](model.parameters(), **options)

    whole = small(name, dtype)
    optimizer = make(whole)
    for seed in range(3):
        step(name, whole, optimizer, seed)
    tensors, values = optimizer_state(optimizer, whole.named_parameters())
    tensors, values = through_files(tensors, values)
    resumed = small(name, dtype)
    load_module_state(resumed, module_state(whole))
    other = make(resumed)
    for group in other.param_groups:
        group["lr"] = 77.0  # replaced by the saved rate
    load_optimizer_state(other, resumed.named_parameters(), tensors, values)
    assert optimizer_state(other, resumed.named_parameters())[1] == values
    before = copy.deepcopy(tensors)
    for seed in range(3, 6):
        step(name, whole, optimizer, seed)
        step(name, resumed, other, seed)
    for (key, one), same in zip(
        whole.state_dict().items(), resumed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, same), key
    own, found = (
        optimizer_state(*pair)[0]
        for pair in ((optimizer, whole.named_parameters()), (other, resumed.named_parameters()))
    )
    assert own.keys() == found.keys()
    for key, one in own.items():
        assert (found[key].dtype, found[key].stride()) == (one.dtype, one.stride()), key
        assert torch.equal(found[key], one), key
    # Loaded tensors share no memory with the checkpoint.
    assert all(torch.equal(one, before[key]) for key, one in tensors.items())


def trained(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, Any]:
    model = nn.Linear(3, 2)
    optimizer = make(model)
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def adam(model: nn.Module, lr: Any = 0.01, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr, **options)


def test_options_of_groups_are_loaded_including_tensors():
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [model.weight], "lr": torch.tensor(0.01, dtype=torch.float64)},
                {"params": [model.bias], "betas": (0.8, 0.9), "capturable": None, "foreach": False},
            ],
            0.002,
        )

    model, optimizer = trained(make)
    other = make(model)
    other.param_groups[0]["lr"].zero_()
    tensors, values = through_files(*optimizer_state(optimizer, model.named_parameters()))
    load_optimizer_state(other, model.named_parameters(), tensors, values)
    for one, same in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert {**one, "params": 0} == {**same, "params": 0}
        assert type(one["betas"]) is type(same["betas"]) is tuple
    assert other.param_groups[0]["lr"].dtype == torch.float64
    # The loaded option is a copy of the checkpoint's tensor.
    other.param_groups[0]["lr"].zero_()
    assert tensors["group/0/lr"] == 0.01


def with_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    lr_scheduler.ConstantLR(optimizer)
    return optimizer


def of_groups(*groups: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": one} for one in groups])


WIDER = {"weight": "4x3 float32", "bias": "4 float32"}
EXTRA = {"values": {}, "tensors": {}}
AVERAGE = "state/bias/exp_avg"
REFUSED: dict[str, tuple[Callable[..., tuple[Any, Any, Any]], str]] = {
    "other kind": (lambda m, t, v: (torch.optim.AdamW(m.parameters()), t, v), "AdamW"),
    "other order": (lambda m, t, v: (of_groups([m.bias, m.weight]), t, v), "groups"),
    "two groups": (lambda m, t, v: (of_groups([m.weight], [m.bias]), t, v), "groups"),
    "fewer": (lambda m, t, v: (of_groups([m.weight]), t, v), "'bias'"),
    "tensor option": (lambda m, t, v: (adam(m, lr=torch.tensor(0.1)), t, v), "'lr'"),
    "other options": (lambda m, t, v: (with_schedule(adam(m)), t, v), "'initial_lr'"),
    "missing": (lambda m, t, v: (adam(m), {k: t[k] for k in t if k != AVERAGE}, v), "bias/exp_avg"),
    "other shape": (lambda m, t, v: (adam(m), t, v | {"parameters": WIDER}), "'bias'"),
    "surplus": (lambda m, t, v: (adam(m), t | {"state/other/a": torch.ones(2)}, v), "other/a"),
    "unknown": (lambda m, t, v: (adam(m), t, v | {"state": v["state"] | {"o": EXTRA}}), "'o'"),
    "no optimizer": (lambda m, t, v: (adam(m), t, v | {"groups": 3}), "groups"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_state_of_another_optimizer_is_refused(name: str) -> None:
    """The optimizer does not change."""
    change, named = REFUSED[name]
    model, optimizer = trained(adam)
    tensors, values = through_files(*optimizer_state(optimizer, model.named_parameters()))
    other, tensors, values = change(model, tensors, values)
    before = repr(other.state_dict())
    with refused("optimizer") as caught:
        load_optimizer_state(other, model.named_parameters(), tensors, values)
    assert named in caught.value.problem
    assert repr(other.state_dict()) == before


def test_optimizer_states_that_cannot_be_saved_are_refused() -> None:
    model, optimizer = trained(adam)
    with refused("optimizer"):
        optimizer_state(optimizer, [("weight", model.weight)])
    optimizer.state[model.bias]["history"] = [model.bias]
    with refused("optimizer.history[0]"):
        optimizer_state(optimizer, model.named_parameters())
    del optimizer.state[model.bias]["history"]
    optimizer.state["all"] = {"step": 3}
    with refused("optimizer"):
        optimizer_state(optimizer, model.named_parameters())
    with refused("optimizer"):
        optimizer_state(torch.optim.LBFGS(model.parameters()), model.named_parameters())
