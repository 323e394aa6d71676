"""A device clock measures the device's times, not the host's.

Gates replace long work: the host decides when a gate opens. Work behind a gate in a stream runs
only after the gate opens, on machines of any speed.
"""

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from paceline.core.plan import Kind, Lane, Resource
from paceline.exchange.step import Share, train_step
from paceline.links.clock import clock_for
from paceline.record.recorder import Recorder, Role, noted
from simulated_gpu.device import SimulatedDevice
from simulated_gpu.lent import simulated_gpus

HELD_S = 0.05
NEVER_S = 30.0  # after this time a gate opens, and tests that wait for it fail


class Gate:
    """Work of the current stream that lasts until the host opens the gate."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._opened = threading.Event()
        self.is_passed = False
        device.current_stream().put(self._pass, "gate")

    def _pass(self) -> None:
        self._opened.wait(NEVER_S)
        self.is_passed = True

    def hold(self) -> tuple[float, float]:
        """Open the gate after HELD_S; return the times before and after the delay."""
        before_s = time.monotonic()
        time.sleep(HELD_S)
        after_s = time.monotonic()
        self._opened.set()
        return before_s, after_s


class Gated(nn.Module):
    """A layer whose forward pass in training queues a gate on the device."""

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._device, self.gate = device, None

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.gate = Gate(self._device)
        return x * self.weight


def test_layers_have_the_times_of_the_device_and_not_of_the_host(device):
    """The host finishes the step before the device finishes the second layer."""
    on = device.torch_device
    model = nn.Sequential(Gated(device), Gated(device)).to(on)
    model[0].eval()
    recorder = Recorder(clock_for(on), "gpu0", 0)
    share = Share(torch.randn(2, 3).to(on), torch.tensor([0, 2]).to(on), 1.0)
    recorder.start_trace(model)
    train_step(model, torch.optim.SGD(model.parameters(), 0.01), iter([share]), recorder)
    assert not model[1].gate.is_passed
    _, after_s = model[1].gate.hold()
    recorder.stop_trace()
    found = {(span.kind, span.part): span for span in recorder.spans()}
    assert found[Kind.FORWARD, "1"].end_s >= after_s
    # Later work of the stream starts after the gate opens.
    assert found[Kind.BACKWARD, "1"].start_s >= after_s
    assert found[Kind.STEP, ""].start_s >= after_s


@pytest.mark.parametrize(
    ("kind", "lane"),
    [(Kind.D2H, Lane.D2H), (Kind.H2D, Lane.H2D), (Kind.REDUCE, Lane.COMPUTE)],
)
def test_copies_have_their_own_lanes_and_sums_are_in_the_compute_lane(device, kind, lane):
    recorder = Recorder(clock_for(device.torch_device), "gpu0", 0)
    recorder.start_trace()
    with noted(recorder, kind, "layer", Role.ALONE):
        pass
    (span,) = recorder.spans()
    assert span.on == (Resource("gpu0", lane),)


@pytest.mark.parametrize("current", [0, 1, None])
def test_a_clock_sees_the_work_of_its_own_device_whichever_is_current(current):
    with simulated_gpus(2) as both:
        busy, idle = both
        busy_clock, clock = (clock_for(device.torch_device) for device in both)
        gate = Gate(busy)
        with nullcontext() if current is None else both[current].use(both[current].new_stream()):
            clock.seconds([clock.mark()])
        assert not gate.is_passed
        # The busy device's clock waits for the gate.
        with idle.use() if current == 1 else nullcontext():
            mark = busy_clock.mark()
        _, opened_s = gate.hold()
        (reached_s,) = busy_clock.seconds([mark])
        assert reached_s >= opened_s
