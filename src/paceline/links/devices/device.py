"""The interface of devices: streams, events, memory and random numbers.

An asynchronous device has streams, which execute queued work in order while the host continues. A
thread queues work in its current stream. A stream can wait for an event of another stream. No
method depends on the thread's current device, because the user may change the current device.
"""

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Event, Stream, Tensor
from torch.profiler import ProfilerActivity

from paceline.core.machine import DeviceKind


class Device:
    """A device of this process: this class is the CPU, and subclasses are GPUs.

    A CPU has no streams, and every call completes its work before the call returns. `backend`: the
    backend of torch.distributed for this kind of device. `has_triton`: whether Triton kernels run
    on it. `profiled`: the activities that torch.profiler records in addition to CPU activity.
    """

    kind = DeviceKind.CPU
    is_asynchronous = False
    backend = "gloo"
    has_triton = False
    profiled: tuple[ProfilerActivity, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    @property
    def name(self) -> str:
        """The product name of a GPU, or "cpu"."""
        return "cpu"

    def new_stream(self) -> Stream:
        """Return a new stream."""
        raise RuntimeError("a CPU has no streams; check `is_asynchronous` first")

    def current_stream(self) -> Stream:
        """Return this thread's current stream of this device."""
        return self.new_stream()

    def record(self, *, timed: bool = False) -> Event:
        """Return an event that is reached after all queued work of the current stream.

        `timed`: the event supports `elapsed_time`. Threads sleep while they wait for the event.
        """
        raise RuntimeError("a CPU has no events; check `is_asynchronous` first")

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has finished its queued work.

        Needed if the memory was allocated in another stream, because the allocator tracks only the
        stream in which memory was allocated.
        """

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Make this device, and optionally one of its streams, current within the block."""
        return nullcontext()

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return the free and total bytes of the device's memory; None for host memory."""
        return None

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process to `nbytes` of this device's memory (host memory, for the CPU)."""
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def reaches(self, other: torch.device) -> bool:
        """Return True if this device can copy directly to and from another device."""
        return True

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory for asynchronous copies; return a function that unpins it."""
        return lambda: None

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, with equal shape, strides and dtype."""
        return torch.empty_like(tensor, device="cpu")

    def random_state(self) -> Tensor | None:
        """Return the state of a GPU's random number generator; None for the CPU."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of a GPU's random number generator."""
