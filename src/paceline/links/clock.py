"""Clocks: `Clock` reads the time, and `DeviceClock` records events in a GPU's stream."""

import time
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Event

from paceline.links.devices import Device, device_of

_ANCHOR_EVERY_S = 5.0
_NUM_ORIGINS = 10


class Clock:
    """Marks times cheaply, and later converts the marks to seconds of this host's clock."""

    def mark(self) -> Any:
        """Return a mark for the end of the work issued so far."""
        return time.monotonic_ns()  # CLOCK_MONOTONIC, which all processes of a kernel share

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the times of the marks; waits for the device if needed."""
        return [mark * 1e-9 for mark in marks]


class DeviceMark(NamedTuple):
    """An event, and the index of its anchor: an earlier event with known time."""

    event: Event
    anchor: int


class DeviceClock(Clock):
    """Marks times on a device by events in this thread's current stream.

    CUDA returns the time between two events as float32 milliseconds, whose resolution is only 0.25
    ms after an hour. So every few seconds a mark becomes the anchor of the following marks, and
    times are measured from the anchor.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        shortest_s = inf
        # Try several events as the first anchor; keep the one whose time the host knows best.
        for _ in range(_NUM_ORIGINS):
            before_s = time.monotonic_ns() * 1e-9
            event = device.record(timed=True)
            event.synchronize()
            after_s = time.monotonic_ns() * 1e-9
            if after_s - before_s < shortest_s:
                shortest_s, self._anchored_s = after_s - before_s, after_s
                self._anchors: list[Event] = [event]
        self._anchor_times = [self._anchored_s]

    def mark(self) -> DeviceMark:
        """Record an event on the current stream, without waiting for the device."""
        event = self._device.record(timed=True)
        now = time.monotonic_ns() * 1e-9
        if now - self._anchored_s > _ANCHOR_EVERY_S:
            self._anchors.append(event)
            self._anchored_s = now
        return DeviceMark(event, len(self._anchors) - 1)

    def seconds(self, marks: Sequence[DeviceMark]) -> list[float]:
        """Wait for the marks, and return the time of each."""
        last = max((mark.anchor for mark in marks), default=0)
        for i in range(len(self._anchor_times), last + 1):
            self._anchor_times.append(self._after(i - 1, self._anchors[i]))
        return [self._after(mark.anchor, mark.event) for mark in marks]

    def _after(self, anchor: int, event: Event) -> float:
        event.synchronize()
        return self._anchor_times[anchor] + self._anchors[anchor].elapsed_time(event) * 1e-3


def clock_for(device: torch.device) -> Clock:
    """Return the clock for work on this device."""
    found = device_of(device)
    return DeviceClock(found) if found.is_asynchronous else Clock()


class TrainingClock:
    """Measures nanoseconds of training, excluding pauses."""

    def __init__(self) -> None:
        self.trained_ns = self._epoch_began_ns = self._offset_ns = 0

    @property
    def epoch_ns(self) -> int:
        """Nanoseconds of training in the current epoch, until the last `stop`."""
        return self.trained_ns - self._epoch_began_ns

    def begin_epoch(self) -> None:
        """Begin an epoch now."""
        self._epoch_began_ns = self.trained_ns

    def resume(self) -> None:
        """Continue after a pause."""
        self._offset_ns = time.monotonic_ns() - self.trained_ns

    def stop(self) -> None:
        """Pause the clock."""
        self.trained_ns = self.at(time.monotonic_ns())

    def at(self, moment_ns: int) -> int:
        """Return the nanoseconds of training until a moment of the monotonic clock."""
        return moment_ns - self._offset_ns

    def state(self) -> list[int]:
        """Return the clock's values, which `restore` sets in another process."""
        return [self.trained_ns, self._epoch_began_ns]

    def restore(self, state: list[int]) -> None:
        """Set the clock to values that `state` returned."""
        self.trained_ns, self._epoch_began_ns = state
