"""The clocks; CUDA's is tested with events that count as CUDA's do, on a made-up device."""

import time

import numpy as np
import pytest
import torch

from paceline.record import clock as module
from paceline.record.clock import CudaClock, HostClock, clock_for

HOUR_S = 3600.0


class Device:
    """A device whose work is done as soon as it is issued, and a host beside it."""

    def __init__(self) -> None:
        self.now_s = 1000.0


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.reached_s = device.now_s

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: "Event") -> float:
            return float(np.float32((other.reached_s - self.reached_s) * 1e3))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: round(device.now_s * 1e9))
    return device


@pytest.mark.parametrize("after_s", [0.0, 60.0, HOUR_S, 100 * HOUR_S])
def test_microseconds_are_told_apart_however_long_a_run_takes(device, after_s: float):
    clock = CudaClock()
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
    clock, marks = CudaClock(), []
    for _ in range(5):
        marks.append(clock.mark())
        device.now_s += 4.0
    forward = clock.seconds(marks)
    assert forward == pytest.approx([1000, 1004, 1008, 1012, 1016])
    assert clock.seconds(marks[::-1]) == forward[::-1]
    assert clock.seconds([]) == []


def test_the_host_clock_is_the_monotonic_one():
    clock = HostClock()
    before = time.monotonic()
    (mark,) = clock.seconds([clock.mark()])
    assert before - 1e-6 <= mark <= time.monotonic() + 1e-6


def test_the_clock_is_that_of_the_device(device):
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 0)), CudaClock)
