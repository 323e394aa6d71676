"""A worker's state, read by another process, continues bit for bit."""

import math
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from paceline.checkpoints.state import load_worker_state, worker_state
from paceline.links.devices import Device, device_of
from paceline.links.packet_workers import Wire
from refusals import refused
from simulated_gpu.lent import simulated_gpus

HOST = device_of(torch.device("cpu"))


@pytest.fixture
def wire() -> Iterator[Wire]:
    own, other = socket.socketpair()
    fd = os.memfd_create("state")
    with own, other:
        yield Wire(own, fd)
    os.close(fd)


def test_a_read_returns_the_state_that_was_written_last(wire):
    """The file is used again for larger and smaller states; earlier copies stay unchanged."""
    found = []
    for numel in (5, 9000, 0):
        wire.write({"sizes": (numel,), "tensor": torch.full((numel,), float(numel))})
        found.append(wire.read())
    assert [one["sizes"] for one in found] == [(5,), (9000,), (0,)]
    assert [one["tensor"].tolist() for one in found] == [[5.0] * 5, [9000.0] * 9000, []]


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4))


def steps(model: nn.Module, optimizers: list[Optimizer], numbers: range) -> None:
    """Train one model by optimizers in turn, like threads: each has its own state."""
    device = next(model.parameters()).device
    for number in numbers:
        source = torch.Generator().manual_seed(number)
        inputs = torch.randn(5, 6, generator=source).to(device)
        optimizer = optimizers[number % len(optimizers)]
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


MAKES = {
    "momentum": lambda some: SGD(some, 0.01, momentum=0.9, nesterov=True),
    "adam": lambda some: Adam(some, 0.01, amsgrad=True),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("num_threads", "before"), [(1, 0), (2, 7)])
def test_optimizers_and_random_numbers_continue_bit_for_bit(wire, make, num_threads, before):
    check_goes_on(wire, HOST, make, num_threads, before)


def test_an_optimizer_on_a_gpu_continues_bit_for_bit(wire):
    with simulated_gpus() as (device,):
        check_goes_on(wire, device, MAKES["adam"], 1, 4)


def check_goes_on(wire: Wire, device: Device, make: Any, num_threads: int, before: int) -> None:
    resumed, model = (net().to(device.torch_device) for _ in range(2))
    optimizers = [make(list(model.parameters())) for _ in range(num_threads)]
    steps(model, optimizers, range(before))
    wire.write(worker_state(optimizers, device))
    resumed.load_state_dict(model.state_dict())
    fresh = [make(list(resumed.parameters())) for _ in range(num_threads)]
    steps(model, optimizers, range(before, before + 6))
    torch.manual_seed(99)
    load_worker_state(fresh, device, *wire.read())
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        own, same = optimizers[0].state[one], fresh[0].state[other]
        # On a GPU, counters stay on the host, and averages on the device.
        assert [same[key].device for key in same] == [own[key].device for key in same]
    wire.write({"other": torch.full((9000,), math.nan)})  # what was loaded is a copy
    steps(resumed, fresh, range(before, before + 6))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one.detach().cpu(), other.detach().cpu())


def test_optimizers_other_than_those_of_torch_are_refused():
    with refused("optimizer"):
        worker_state([object()], HOST)  # type: ignore[list-item]
