"""What a run goes on from: what a worker has of its own, bit by bit, and a run's state."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, NAdam, Optimizer

from hogbatches import classifying
from paceline.checkpoints.memory_file import read_state, write_state
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.devices import Device, device_of
from paceline.links.group import Group
from paceline.strategies.hogbatch import STRATEGY
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.run import HogbatchRunner, epoch_sizes, runner_of
from paceline.strategies.hogbatch.worker_state import load_state, state_of
from refusals import refused
from simulated_gpu.lent import simulated_gpus

HOST = device_of(torch.device("cpu"))
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
TENSORS = st.dictionaries(
    st.text(max_size=20),
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 99)),
    max_size=5,
)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("state")
    yield fd
    os.close(fd)


@given(st.lists(TENSORS, min_size=1, max_size=4))
def test_what_is_read_is_what_was_written_last(states):
    """Whether it is more or less than before, in the same file; what was read before stays."""
    fd, before = os.memfd_create("state"), list[tuple[Tensor, Tensor]]()
    for number, some in enumerate(states):
        tensors = {
            name: torch.full(shape, value).to(dtype) for name, (dtype, shape, value) in some.items()
        }
        values = {"number": number, "names": sorted(tensors), "rate": 0.1 * number}
        write_state(fd, tensors, values)
        found, told = read_state(fd)
        assert (told, found.keys()) == (values, tensors.keys())
        before += [(found[name], tensor) for name, tensor in tensors.items()]
        for one, other in before:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
    os.close(fd)


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))


def steps(model: nn.Module, optimizers: list[Optimizer], numbers: range) -> None:
    """Take turns, as threads would: each optimizer has a state of its own."""
    device = next(model.parameters()).device
    for number in numbers:
        source = torch.Generator().manual_seed(number)
        inputs = torch.randn(5, 6, generator=source).to(device)
        optimizer = optimizers[number % len(optimizers)]
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


MAKES = {
    "sgd": lambda some: SGD(some, 0.01),
    "momentum": lambda some: SGD(some, 0.01, momentum=0.9, nesterov=True),
    "adam": lambda some: Adam(some, 0.01, amsgrad=True),
    "nadam": lambda some: NAdam(some, 0.01),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("num_threads", "before"), [(1, 0), (1, 1), (2, 1), (2, 7)])
def test_optimizers_and_random_numbers_go_on_bit_by_bit(file, make, num_threads, before):
    check_goes_on(file, HOST, make, num_threads, before)


def test_an_optimizer_on_a_gpu_goes_on_too(file):
    with simulated_gpus() as (device,):
        check_goes_on(file, device, MAKES["adam"], 1, 4)


def check_goes_on(file: int, device: Device, make: Any, num_threads: int, before: int) -> None:
    resumed, model = (net().to(device.torch_device) for _ in range(2))
    optimizers = [make(list(model.parameters())) for _ in range(num_threads)]
    steps(model, optimizers, range(before))
    write_state(file, *state_of(optimizers, device))
    resumed.load_state_dict(model.state_dict())
    fresh = [make(list(resumed.parameters())) for _ in range(num_threads)]
    steps(model, optimizers, range(before, before + 6))
    torch.manual_seed(99)
    load_state(fresh, device, *read_state(file))
    write_state(file, {"other": torch.full((9000,), math.nan)}, {})  # what was loaded is a copy
    steps(resumed, fresh, range(before, before + 6))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one.detach().cpu(), other.detach().cpu())


def test_the_state_of_another_optimizer_is_refused(file):
    def of(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [nn.Parameter(torch.zeros(shape)) for shape in shapes]

    write_state(file, *state_of([MAKES["adam"](of((8, 6), (8,)))], HOST))
    for other in (MAKES["sgd"](of((8, 6), (8,))), MAKES["adam"](of((8,), (8, 6)))):
        with refused("optimizer"):
            load_state([other], HOST, *read_state(file))
    with refused("optimizer"):  # which has no state_dict
        state_of([object()], HOST)  # type: ignore[list-item]
    with refused("state.rate"):  # values that are not plain
        write_state(file, {}, {"rate": 1j})


NUM_SAMPLES = 80


@contextmanager
def runner(
    model: nn.Module | None = None,
    num_samples: int = NUM_SAMPLES,
    label: int = 0,
    policy: str = "adaptive",
    **changes: Any,
) -> Iterator[HogbatchRunner]:
    """A runner whose workers are not started."""
    model = model or nn.Linear(6, 3)
    data = torch.zeros(num_samples, 6), torch.full((num_samples,), label)
    settings = TrainSettings(
        model="mine:recipe", strategy="hogbatch", **{"batch_size": 8} | changes
    )
    alone = Group.alone(torch.device("cpu"), settings.deadline_s)
    session = TrainingSession(
        settings, STRATEGY, Hogbatch(policy=policy), "run", alone, MagicMock()
    )
    recipe = replace(classifying(lambda: model, data), num_classes=3)
    with runner_of(session, recipe, model) as found:
        yield found


EPOCH = {"number": 0, "train_loss": 1.0, "test_loss": None, "score": None, "seconds": 1.0}


@pytest.mark.parametrize(
    ("other", "num_epochs"),
    [
        ({"model": nn.Linear(6, 4)}, 0),
        ({"model": nn.Linear(6, 3, bias=False)}, 0),
        ({"num_samples": 90}, 0),
        ({"epochs": 2}, 2),
    ],
)
def test_another_run_is_refused_and_nothing_is_changed(other, num_epochs):
    with runner() as one:  # the state of a run that has not begun, as a checkpoint has it
        tensors, values = one.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    values = json.loads(json.dumps(values))
    if num_epochs:
        values["epochs"] = [EPOCH] * num_epochs
    with runner(**other) as one:
        before = [parameter.detach().clone() for parameter in one._model.parameters()]
        with refused("resume"):
            one.restore(tensors, values)
        for parameter, own in zip(one._model.parameters(), before, strict=True):
            assert torch.equal(parameter, own)


def test_steps_are_batches_of_the_batch_size():
    counts = [{"epochs": 3}, {"steps": 5}, {"steps": 10}, {"steps": 25}]
    settings = [TrainSettings(model="mine:recipe", batch_size=8, **count) for count in counts]
    sizes = [epoch_sizes(one, NUM_SAMPLES) for one in settings]
    assert sizes == [(80, 80, 80), (40,), (80,), (80, 80, 40)]


@pytest.mark.parametrize(
    ("field", "changes"), [("batch_size", {"batch_size": NUM_SAMPLES + 1}), ("data", {"label": 3})]
)
def test_batches_and_labels_that_do_not_fit_are_refused(field: str, changes):
    with refused(field), runner(policy="hogbatch", **changes) as one:
        one.measure()
