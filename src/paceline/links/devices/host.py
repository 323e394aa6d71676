"""The CPU: work is done when the call returns."""

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
    """The CPU, which has no streams."""

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
        raise RuntimeError("a CPU has no streams; ask `is_asynchronous` first")

    def current_stream(self) -> NoReturn:
        """Raise RuntimeError."""
        self.new_stream()

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Do nothing: there is only one CPU device."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return None, since it uses host memory."""
        return None

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process's private writable memory, without a core dump when it runs out."""
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def reaches(self, other: torch.device) -> bool:
        """Return True: the CPU has one memory."""
        return True

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Do nothing: no copies are needed."""
        return lambda: None

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor of equal shape, strides and type."""
        return torch.empty_like(tensor, device="cpu")

    def random_state(self) -> Tensor | None:
        """Return None, since it uses the host's random numbers."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Do nothing."""
