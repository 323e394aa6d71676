"""Device clocks and their precision, and the unrest of step times."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from absent_ranks import group_of
from boxes import chain
from paceline.core.cost import compute_lane, exchange_lane
from paceline.core.machine import DeviceKind
from paceline.core.plan import Kind
from paceline.core.timeline import Span
from paceline.links import clock as module
from paceline.links.clock import Clock, DeviceClock, clock_for
from paceline.links.group import Group
from paceline.measure.device_profile import DeviceProfile, HubLink, profile_device
from paceline.measure.timing import Rounds, rounds_of_all, unrest_of, unrest_of_traced
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.measure import calibrate
from simulated_gpu.tensors import devices


class CountsInFloat32:
    """A device that runs work at once and returns event times in float32, as CUDA does."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.late_s = iter(())  # delay with which the host learns of each event

    def synchronize(self) -> None: ...

    def record(self, *, timed: bool = False) -> SimpleNamespace:
        assert timed
        reached_s = self.now_s

        def elapsed_time(end: SimpleNamespace) -> float:
            return float(np.float32((end.reached_s - reached_s) * 1e3))

        def synchronize() -> None:
            self.now_s += next(self.late_s, 0.0)

        return SimpleNamespace(
            reached_s=reached_s, elapsed_time=elapsed_time, synchronize=synchronize
        )


@pytest.fixture
def device(monkeypatch) -> CountsInFloat32:
    device = CountsInFloat32()
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: round(device.now_s * 1e9))
    return device


@pytest.mark.parametrize("after_s", [0.0, 60.0, 36_000.0])
def test_differences_of_microseconds_are_measured_after_hours(device, after_s: float):
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
    # Times may be read in any order, and again.
    assert clock.seconds(marks[::-1]) == times[::-1]
    assert clock.seconds([]) == []


def test_the_origin_is_the_event_with_the_shortest_delay(device):
    device.late_s = iter([0.02, 0.5, 1e-4, 0.3, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02])
    clock = DeviceClock(device)
    for _ in range(3):
        device.now_s += 1.0
        (time_s,) = clock.seconds([clock.mark()])
        assert time_s - device.now_s == pytest.approx(1e-4, abs=1e-6)


def test_a_cpu_has_the_monotonic_clock_and_a_gpu_its_own():
    clock = clock_for(torch.device("cpu"))
    before = time.monotonic()
    (mark,) = clock.seconds([clock.mark()])
    assert before - 1e-6 <= mark <= time.monotonic() + 1e-6
    assert isinstance(clock, Clock)
    (simulated,) = devices(1)
    assert isinstance(clock_for(simulated.torch_device), DeviceClock)


CALM: Rounds = [[1.0, 9.0]] * 8
RESTLESS: Rounds = [[1.0, 9.0], [2.0, 9.0]] * 4  # quartiles 1 and 2, median 1.5
# The slower rank of each step computes 4, 5, 6, 7, 8 s: quartiles 5 and 7, median 6. The exchange
# (second value) does not count.
FIRST = [[own, 100.0] for own in (4.0, 1.0, 6.0, 1.0, 8.0)]
SECOND = [[own, 0.0] for own in (1.0, 5.0, 1.0, 7.0, 1.0)]


@pytest.mark.parametrize(
    ("rounds", "unrest"),
    [([FIRST, SECOND], 2 / 12), ([[[1.0]] * 9 + [[50.0]]], 0.0)],  # a single pause
)
def test_unrest_is_between_the_quartiles_of_the_slowest_ranks_steps(rounds, unrest):
    assert unrest_of(rounds) == pytest.approx(unrest)


class BesideRestless(Group):
    """A group whose other rank has restless steps."""

    def gather(self, value: Rounds) -> list[Rounds]:
        return [value, [[10 * step, other] for step, other in RESTLESS]]


@pytest.mark.parametrize(
    ("taken", "expected", "group"),
    [
        ([CALM, RESTLESS], CALM, group_of()),
        ([RESTLESS, CALM, CALM], RESTLESS + CALM, group_of()),
        # Exchanges are collective: if one rank stopped alone, the others would wait forever.
        ([CALM, CALM, CALM], CALM + CALM, group_of(0, 2, kind=BesideRestless)),
    ],
)
def test_restless_rounds_are_measured_once_more(taken, expected, group):
    left = list(taken)
    own, *others = rounds_of_all(lambda: left.pop(0), group)
    assert (own, len(left)) == (expected, 1)
    assert [len(other) for other in others] == [2 * len(RESTLESS)] * (group.world_size - 1)


def span(step: int, device: str, seconds: float, kind: Kind = Kind.FORWARD) -> Span:
    lane = exchange_lane(device) if kind is Kind.REDUCE else compute_lane(device)
    return Span(kind, step, kind.value, 0, (lane,), 5.0, 5.0 + seconds)


def test_the_unrest_of_traced_steps_is_that_of_the_slowest_devices_computation():
    # cpu0 computes 5 and 3 s in turn, cpu1 always 4 s: the slowest device takes 5 and 4 s.
    spans = []
    for step in range(8):
        spans += [span(step, "cpu0", 2.0), span(step, "cpu0", 3.0 - 2 * (step % 2), Kind.BACKWARD)]
        spans += [span(step, "cpu1", 4.0), span(step, "cpu1", 100.0 * step, Kind.REDUCE)]
    assert unrest_of_traced(spans) == pytest.approx(1 / (2 * 4.5))
    assert unrest_of_traced(spans[:1]) == 0.0


def test_a_device_profile_has_the_unrest_of_its_steps():
    spans: list[Span] = []

    def run_step(number: int) -> None:
        spans.append(span(number, "cpu1", 1.0 + number % 2))

    found = profile_device(torch.device("cpu"), (), run_step, spans, 0.0)
    # Two warm-up steps, then three steps of 1, 2 and 1 s: quartiles 1 and 1.5, median 1.
    assert found.unrest == pytest.approx(0.25)


@pytest.mark.parametrize(("cores", "expected"), [(3, 0.4), (2, 0.0)])
def test_bodies_of_wheel_with_a_core_each_widen_the_range(cores: int, expected: float):
    """The unrest of bodies that share a core, and of the hub, is ignored."""
    facts = {"kind": DeviceKind.CPU, "host": "1", "seconds": ((Kind.FORWARD, "l0", 0.5),)}
    link = HubLink(latency_s=0.0, bytes_per_s=1e8, core_bytes_per_s=1e8)
    facts |= {"codecs": {}, "cores": cores, "link": link}
    hub, *bodies = (DeviceProfile(**facts, unrest=unrest) for unrest in (9.0, 0.1, 0.4))
    work, config = chain((1.0, 4), (1.0, 4)), Wheel(workers=2, lanes=1)
    found = calibrate(work, config, hub, dict(enumerate(bodies)), is_paced=False)
    assert found.machine.usual_losses.unrest == expected
