"""What differs between devices: streams, events, memory, random numbers.

A device that is asynchronous has streams, in which work is done one piece after another while the
host goes on. A thread queues work in its current stream. A stream waits for another at an event.
Nothing here asks which device is the thread's current one: that belongs to the user.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from paceline.core.machine import DeviceKind


class Event(Protocol):
    """A place in a stream, reached when all work queued there before it is done."""

    @property
    def is_reached(self) -> bool:
        """True once it is reached: `synchronize` returns at once then."""

    def synchronize(self) -> None:
        """Wait on the host until it is reached; the waiting thread sleeps."""

    def seconds_after(self, earlier: "Event") -> float:
        """Return the seconds from another event to this one; both timed, and both reached."""


class Stream(Protocol):
    """A queue of work on a device."""

    def record(self, *, timed: bool = False) -> Event:
        """Return an event behind all work that is queued here now."""

    def wait(self, event: Event) -> None:
        """Begin the work that is queued here from now on only when the event is reached."""

    def wait_stream(self, other: "Stream") -> None:
        """Begin the work that is queued here from now on after all that is queued there now."""

    def synchronize(self) -> None:
        """Wait on the host until all work queued here is done."""

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until the work that is queued here when it is freed.

        Needed for memory that was allocated in another stream: the allocator knows of that alone.
        """


class Device(Protocol):
    """A device of this process.

    `backend`: of torch.distributed, for tensors on devices of this kind. `has_triton`: True if
    Triton's kernels can run here. `profiled`: what torch.profiler records of it beside the host's
    calls.
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
        """Return the stream in which this thread queues work for this device."""

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Make this device, and one of its streams, those of this thread for a while."""

    def synchronize(self) -> None:
        """Wait until all work that is queued in all streams is done."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return the free bytes of its own memory and all of them; None if it has the host's."""

    def limit_memory(self, nbytes: int) -> None:
        """Refuse this process more than so much of the memory in which tensors lie."""

    def reaches(self, other: torch.device) -> bool:
        """Return True if it copies to and from another device of its kind without the host."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory, of which copies are asynchronous then; return what undoes it.

        Raises InvalidInput if the system does not allow so much.
        """

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, of the same shape, strides and type.

        Raises InvalidInput if the system does not allow so much.
        """

    def random_state(self) -> Tensor | None:
        """Return the state of the device's random numbers; None if they are the host's."""

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the device's random numbers."""
