"""The host's own cores: work is done when the call that asks for it returns."""

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
        """Raise RuntimeError: there are no streams."""
        raise RuntimeError("a CPU has no streams; ask `is_asynchronous` first")

    def current_stream(self) -> NoReturn:
        """Raise RuntimeError: there are no streams."""
        self.new_stream()

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Do nothing: there is one device of this kind."""
        return nullcontext()

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return None: its memory is the host's."""
        return None

    def limit_memory(self, nbytes: int) -> None:
        """Refuse this process more than so much private writable memory."""
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump when memory runs out

    def reaches(self, other: torch.device) -> bool:
        """Return True: its own memory is the only one of this kind."""
        return True

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Do nothing: nothing is copied between host and device."""
        return lambda: None

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor of the same shape, strides and type."""
        return torch.empty_like(tensor, device="cpu")

    def random_state(self) -> Tensor | None:
        """Return None: the random numbers are the host's."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Do nothing."""
