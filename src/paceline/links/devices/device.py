"""The interface of devices: streams, events, memory and random numbers.

An asynchronous device has streams, which execute queued work in order while the host continues. A
thread queues work in its current stream. A stream can wait for an event of another stream. No
method depends on the thread's current device, because the user may change the current device.
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
        """Whether the event is reached, so that `synchronize` would return immediately."""

    def synchronize(self) -> None:
        """Wait on the host, without spinning, until the event is reached."""

    def seconds_after(self, earlier: "Event") -> float:
        """Return the seconds from `earlier` to this event; both must be timed and reached."""


class Stream(Protocol):
    """A queue of work on a device."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event that is reached after all queued work of this stream."""

    def wait(self, event: Event) -> None:
        """Make later work of this stream wait for the event."""

    def wait_stream(self, other: "Stream") -> None:
        """Make later work of this stream wait for all queued work of the other stream."""

    def synchronize(self) -> None:
        """Wait on the host until all queued work of this stream is done."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until this stream has finished its queued work.

        Needed if the memory was allocated in another stream, because the allocator tracks only the
        stream in which memory was allocated.
        """


class Device(Protocol):
    """A device of this process.

    `backend`: the backend of torch.distributed for this kind of device. `has_triton`: whether
    Triton kernels run on it. `profiled`: the activities that torch.profiler records in addition to
    CPU activity.
    """

    torch_device: torch.device
    kind: DeviceKind
    is_asynchronous: bool
    backend: str
    has_triton: bool
    profiled: tuple[ProfilerActivity, ...]

    @property
    def name(self) -> str:
        """The product name of a GPU, or "cpu"."""

    def new_stream(self) -> Stream:
        """Return a new stream."""

    def current_stream(self) -> Stream:
        """Return this thread's current stream of this device."""

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Make this device, and optionally one of its streams, current within the block."""

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return the free and total bytes of the device's memory; None for host memory."""

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process to `nbytes` of the memory that contains this device's tensors."""

    def reaches(self, other: torch.device) -> bool:
        """Return True if this device can copy directly to and from another device."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory for asynchronous copies; return a function that unpins it."""

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, with equal shape, strides and dtype."""

    def random_state(self) -> Tensor | None:
        """Return the state of a GPU's random number generator; None for the CPU."""

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the device's random number generator."""
