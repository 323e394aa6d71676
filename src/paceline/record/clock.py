"""Marks in time: read at once on a CPU, left in the stream on a GPU."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes cheap marks now and tells their times later, in seconds of this host's clock."""

    def mark(self) -> Any:
        """Return a mark for this moment of the work that was issued so far."""
        ...

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the times of the marks, waiting for the device where that is needed."""
        ...


class HostClock:
    """The monotonic clock: work on a CPU is done when the call returns."""

    def mark(self) -> int:
        """Return nanoseconds of CLOCK_MONOTONIC, which all processes of a kernel share."""
        return time.monotonic_ns()

    def seconds(self, marks: Sequence[int]) -> list[float]:
        """Return the marks in seconds."""
        return [mark * 1e-9 for mark in marks]


class CudaClock:
    """CUDA events: a mark is reached when the work issued before it on its stream is done."""

    def __init__(self) -> None:
        self._origin = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._origin.record()
        self._origin.synchronize()
        self._origin_s = time.monotonic_ns() * 1e-9

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream; does not wait for the device."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Wait for the device, then return when each event was reached."""
        torch.cuda.synchronize()
        return [self._origin_s + self._origin.elapsed_time(mark) * 1e-3 for mark in marks]


def clock_for(device: torch.device) -> Clock:
    """Return the clock that sees when work on this device is done."""
    return CudaClock() if device.type == "cuda" else HostClock()
