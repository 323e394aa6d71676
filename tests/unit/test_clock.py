"""The clocks: how a device's tells times, and how long they stay exact."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.devices.simulated_tensors import devices
from paceline.record import clock as module
from paceline.record.clock import DeviceClock, HostClock, clock_for

HOUR_S = 3600.0


class CountsInFloat32:
    """A device whose work is done as soon as it is issued, and whose events count as CUDA's do."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.late_s = iter(())  # by how much the host is told too late of each event

    def synchronize(self) -> None: ...

    def current_stream(self) -> "CountsInFloat32":
        return self

    def record(self, *, timed: bool = False) -> SimpleNamespace:
        assert timed
        reached_s = self.now_s

        def seconds_after(earlier: SimpleNamespace) -> float:
            return float(np.float32((reached_s - earlier.reached_s) * 1e3)) * 1e-3

        def synchronize() -> None:
            self.now_s += next(self.late_s, 0.0)

        return SimpleNamespace(
            reached_s=reached_s, seconds_after=seconds_after, synchronize=synchronize
        )


@pytest.fixture
def device(monkeypatch) -> CountsInFloat32:
    device = CountsInFloat32()
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: round(device.now_s * 1e9))
    return device


@pytest.mark.parametrize("after_s", [0.0, 60.0, HOUR_S, 100 * HOUR_S])
def test_microseconds_are_told_apart_however_long_a_run_takes(device, after_s: float):
    clock = DeviceClock(device)
    start_s, taken = device.now_s, []
    while device.now_s < start_s + after_s:
        device.now_s += 20.0
        taken.append((clock.mark(), device.now_s))
    for _ in range(50):
        taken.append((clock.mark(), device.now_s))
        device.now_s += 3e-6
    marks = [mark for mark, _ in taken]
    times = clock.seconds(marks)
    assert times == pytest.approx([time_s for _, time_s in taken], rel=0, abs=1e-3)
    gaps = [later - earlier for earlier, later in zip(times[-50:], times[-49:], strict=False)]
    assert gaps == pytest.approx([3e-6] * 49, rel=0.2)


def test_marks_may_be_asked_for_in_any_order_and_again(device):
    clock, marks = DeviceClock(device), []
    for _ in range(5):
        marks.append(clock.mark())
        device.now_s += 4.0
    forward = clock.seconds(marks)
    assert forward == pytest.approx([1000, 1004, 1008, 1012, 1016])
    assert clock.seconds(marks[::-1]) == forward[::-1]
    assert clock.seconds([]) == []


def test_its_origin_is_the_event_of_which_the_host_was_told_soonest(device):
    device.late_s = iter([0.02, 0.5, 1e-4, 0.3, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02])
    clock = DeviceClock(device)
    for _ in range(3):
        device.now_s += 1.0
        (time_s,) = clock.seconds([clock.mark()])
        assert time_s - device.now_s == pytest.approx(1e-4, abs=1e-6)


def test_the_host_clock_is_the_monotonic_one():
    clock = HostClock()
    before = time.monotonic()
    (mark,) = clock.seconds([clock.mark()])
    assert before - 1e-6 <= mark <= time.monotonic() + 1e-6


def test_the_clock_is_that_of_the_device():
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    (simulated,) = devices(1)
    assert isinstance(clock_for(simulated.torch_device), DeviceClock)
