"""Marks in time: read at once on a CPU, left in the stream on a GPU."""

import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch

from paceline.links.devices import Device, Event, device_of

_ANCHOR_EVERY_S = 5.0
_NUM_ORIGINS = 10


class Clock(Protocol):
    """Takes cheap marks now and tells their times later, in seconds of this host's clock."""

    def mark(self) -> Any:
        """Return a mark for this moment of the work that was issued so far."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the times of the marks, waiting for the device where that is needed."""


class HostClock:
    """The monotonic clock: work on a CPU is done when the call returns."""

    def mark(self) -> int:
        """Return nanoseconds of CLOCK_MONOTONIC, which all processes of a kernel share."""
        return time.monotonic_ns()

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Return the marks in seconds."""
        return [mark * 1e-9 for mark in marks]


class DeviceMark(NamedTuple):
    """An event, and the number of the anchor from which it is timed."""

    event: Event
    anchor: int


class DeviceClock:
    """Events of a device: a mark is reached when the work issued before it on its stream is done.

    That is the stream in which the thread queues work for this device, whichever device is current.

    CUDA tells the time between two events as a float32 of milliseconds, which after an hour counts
    in quarters of one. So every few seconds a mark becomes an anchor for those that follow.

    Telling times waits for marks and their anchors alone: later work may still be queued.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        # The host is told some time after an event was reached: the shortest wait errs the least.
        _, self._anchored_s, origin = min(
            (self._origin() for _ in range(_NUM_ORIGINS)), key=itemgetter(0)
        )
        self._anchors: list[Event] = [origin]
        self._anchor_times = [self._anchored_s]

    def _origin(self) -> tuple[float, float, Event]:
        """Return how long the host waits for an event, its time then, and the event."""
        before_s = time.monotonic_ns() * 1e-9
        event = self._device.current_stream().record(timed=True)
        event.synchronize()
        after_s = time.monotonic_ns() * 1e-9
        return after_s - before_s, after_s, event

    def mark(self) -> DeviceMark:
        """Record an event on the current stream; does not wait for the device."""
        event = self._device.current_stream().record(timed=True)
        now = time.monotonic_ns() * 1e-9
        if now - self._anchored_s > _ANCHOR_EVERY_S:
            self._anchors.append(event)
            self._anchored_s = now
        return DeviceMark(event, len(self._anchors) - 1)

    def seconds(self, marks: Sequence[DeviceMark]) -> list[float]:
        """Wait for the marks, then return when each was reached."""
        last = max((mark.anchor for mark in marks), default=0)
        for i in range(len(self._anchor_times), last + 1):
            self._anchor_times.append(self._after(i - 1, self._anchors[i]))
        return [self._after(mark.anchor, mark.event) for mark in marks]

    def _after(self, anchor: int, event: Event) -> float:
        event.synchronize()
        return self._anchor_times[anchor] + event.seconds_after(self._anchors[anchor])


def clock_for(device: torch.device) -> Clock:
    """Return the clock that sees when work on this device is done."""
    found = device_of(device)
    return DeviceClock(found) if found.is_asynchronous else HostClock()


class TrainingClock:
    """A clock of training, in nanoseconds, that stands still in pauses."""

    def __init__(self) -> None:
        self.trained_ns = self._epoch_began_ns = self._offset_ns = 0

    @property
    def epoch_ns(self) -> int:
        """The time since the epoch began."""
        return self.trained_ns - self._epoch_began_ns

    def begin_epoch(self) -> None:
        """Count an epoch from now."""
        self._epoch_began_ns = self.trained_ns

    def go_on(self) -> None:
        """Go on after a pause."""
        self._offset_ns = time.monotonic_ns() - self.trained_ns

    def stop(self) -> None:
        """Stand still."""
        self.trained_ns = self.at(time.monotonic_ns())

    def at(self, moment_ns: int) -> int:
        """Return the time of training at a moment of the monotonic clock."""
        return moment_ns - self._offset_ns

    def state(self) -> list[int]:
        """Return what the clock goes on from."""
        return [self.trained_ns, self._epoch_began_ns]

    def restore(self, state: list[int]) -> None:
        """Go on from such a state."""
        self.trained_ns, self._epoch_began_ns = state
