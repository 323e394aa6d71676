"""The CPU as a `Device`: every call completes its work before the call returns."""

import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from paceline.core.machine import DeviceKind
from paceline.links.devices.device import Stream


class HostDevice:
    """The CPU as a `Device`, which has no streams."""

    kind = DeviceKind.CPU
    is_asynchronous = False
    name = "cpu"
    backend = "gloo"
    has_triton = False
    profiled: tuple[ProfilerActivity, ...] = ()

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    def new_stream(self) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("a CPU has no streams; check `is_asynchronous` first")

    def current_stream(self) -> NoReturn:
        """Raise RuntimeError."""
        self.new_stream()

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Do nothing, because there is only one CPU device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing, because all work is done when its call returns."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return None, since the CPU uses host memory."""
        return None

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process's private writable memory, and disable core dumps."""
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def reaches(self, other: torch.device) -> bool:
        """Return True, because the CPU accesses all host memory."""
        return True

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Do nothing, because a CPU needs no copies; return a function that does nothing."""
        return lambda: None

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor of equal shape, strides and dtype."""
        return torch.empty_like(tensor, device="cpu")

    def random_state(self) -> Tensor | None:
        """Return None, because callers save the host's random number generator separately."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Do nothing, because `random_state` returns None."""
