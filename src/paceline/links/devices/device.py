"""The differences between devices: streams, events, memory and random numbers.

An asynchronous device has streams, which execute queued work in order while the host continues. A
thread queues work in its current stream; a stream waits for another one at an event. Nothing here
depends on the thread's current device, which belongs to the user.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from paceline.core.machine import DeviceKind


class Event(Protocol):
    """A position in a stream, reached when all earlier work of the stream is done."""

    @property
    def is_reached(self) -> bool:
        """True once it is reached, when `synchronize` returns immediately."""

    def synchronize(self) -> None:
        """Wait on the host until it is reached, without spinning."""

    def seconds_after(self, earlier: "Event") -> float:
        """Return the seconds from another event; both must be timed and reached."""


class Stream(Protocol):
    """A queue of work on a device."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event after all queued work."""

    def wait(self, event: Event) -> None:
        """Make later work wait for the event."""

    def wait_stream(self, other: "Stream") -> None:
        """Make later work wait for all queued work of the other stream."""

    def synchronize(self) -> None:
        """Wait on the host until all queued work is done."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until this stream has finished its queued work.

        Needed for memory allocated in another stream: the allocator tracks only that one.
        """


class Device(Protocol):
    """A device of this process.

    `backend` is torch.distributed's for this kind of device. `has_triton`: Triton kernels can run.
    `profiled`: the activities that torch.profiler records in addition to host calls.
    """

    torch_device: torch.device
    kind: DeviceKind
    is_asynchronous: bool
    backend: str
    has_triton: bool
    profiled: tuple[ProfilerActivity, ...]

    @property
    def name(self) -> str:
        """The product's name, or "cpu"."""

    def new_stream(self) -> Stream:
        """Return a new stream."""

    def current_stream(self) -> Stream:
        """Return this thread's current stream of this device."""

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Make this device, and optionally one of its streams, current within the block."""

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return the free and total bytes of its memory; None if it uses host memory."""

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process to `nbytes` of the memory for tensors."""

    def reaches(self, other: torch.device) -> bool:
        """Return True if it can copy to and from another device without the host."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory for asynchronous copies; return a function that unpins it."""

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, with equal shape, strides and type."""

    def random_state(self) -> Tensor | None:
        """Return the state of the device's random numbers; None if it uses the host's."""

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the device's random numbers."""
