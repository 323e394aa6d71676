"""The devices of NVIDIA's GPUs, implemented with torch.cuda."""

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path

import torch
from torch import Stream, Tensor
from torch.profiler import ProfilerActivity

from paceline.core.errors import InvalidInput, first_line
from paceline.core.machine import DeviceKind
from paceline.links.devices.device import Device

_DEVICE_FILES = Path("/dev")
_FORK_S = 30.0  # deadline for a fork's answer; long, because the machine may be busy
_HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs


def found_gpus(*, usable: bool) -> tuple[torch.device, ...]:
    """Return the NVIDIA GPUs; raise InvalidInput if GPUs exist but PyTorch finds none.

    `usable`: if True, check that PyTorch can use the GPUs, which initialises CUDA; if False, only
    ask the driver.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")  # an old driver causes no error, only a warning
        count = torch.cuda.device_count() if not usable or torch.cuda.is_available() else 0
    if count == 0 and (why := _why_unusable([str(one.message) for one in found if usable])):
        hint = "fix that, or set CUDA_VISIBLE_DEVICES= to compute on CPU cores"
        raise InvalidInput("device", f"cannot use this machine's GPU: {why}", hint=hint)
    return tuple(torch.device("cuda", index) for index in range(count))


def can_fork() -> bool:
    """Return True if forks of this process can use GPUs, because it has not initialised CUDA.

    PyTorch tells this only in a fork, so this function forks a process. Also returns False if the
    forked process does not end in time, for example because a library's fork handler hangs.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(is_broken_by_fork())
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], _FORK_S)[0]:
        os.kill(pid, signal.SIGKILL)
    os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0


def is_broken_by_fork() -> bool:
    """Return True in a forked process if the parent had initialised CUDA before the fork."""
    return bool(torch.cuda._is_in_bad_fork())


def _why_unusable(warned: Sequence[str]) -> str | None:
    """Return why PyTorch cannot use this machine's GPU; None without a visible GPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return None
    if not any(_DEVICE_FILES.glob("nvidia[0-9]*")):
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    reasons = [text.partition("(Triggered")[0].strip() for text in warned]
    return next(iter(reasons), "torch finds no CUDA device")


class CudaDevice(Device):
    """A GPU of this process. Constructing this object does not initialise CUDA."""

    kind = DeviceKind.GPU
    is_asynchronous = True
    backend = "nccl"
    has_triton = True
    profiled = (ProfilerActivity.CUDA,)

    @cached_property
    def name(self) -> str:
        """The GPU's product name."""
        return torch.cuda.get_device_name(self.torch_device)

    def new_stream(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self.torch_device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return this thread's current stream of this GPU."""
        return torch.cuda.current_stream(self.torch_device)

    def record(self, *, timed: bool = False) -> torch.cuda.Event:
        """Record an event in the current stream."""
        # blocking: the waiting thread sleeps instead of spinning on a core
        event = torch.cuda.Event(enable_timing=timed, blocking=True)
        event.record(self.current_stream())
        return event

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has finished its queued work."""
        tensor.record_stream(self.current_stream())

    @contextmanager
    def use(self, stream: Stream | None = None) -> Iterator[None]:
        """Make this GPU, and optionally one of its streams, current within the block."""
        assert stream is None or isinstance(stream, torch.cuda.Stream)
        own: AbstractContextManager[object]
        own = nullcontext() if stream is None else torch.cuda.stream(stream)
        # Select the GPU first, so that `own` saves and later restores this GPU's current stream.
        with torch.cuda.device(self.torch_device), own:
            yield

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""
        torch.cuda.synchronize(self.torch_device)

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return the free and total bytes of the GPU's memory."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free, int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process to `nbytes` of the GPU's memory."""
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.torch_device)

    def reaches(self, other: torch.device) -> bool:
        """Return True if this GPU has peer access to another GPU."""
        return torch.cuda.can_device_access_peer(self.torch_device, other)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory; return a function that unpins it. Raises InvalidInput on failure."""
        runtime, check = torch.cuda.cudart(), torch.cuda.check_error
        address, nbytes = memory.data_ptr(), memory.nbytes
        with self._pinning(nbytes):
            check(runtime.cudaHostRegister(address, nbytes, 0))

        def unpin() -> None:
            with self.use():
                check(runtime.cudaHostUnregister(address))

        return unpin

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, with equal shape, strides and dtype."""
        with self._pinning(tensor.nbytes):
            return torch.empty_like(tensor, device="cpu", pin_memory=True)

    @contextmanager
    def _pinning(self, nbytes: int) -> Iterator[None]:
        with self.use():  # else PyTorch would create a CUDA context on GPU 0
            try:
                yield
            except RuntimeError as error:
                problem = f"{self.torch_device} cannot pin {nbytes:,} bytes: {first_line(error)}"
                hint = "free memory, or use fewer workers"
                raise InvalidInput("device", problem, hint=hint) from None

    def random_state(self) -> Tensor | None:
        """Return the state of the GPU's random number generator."""
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the GPU's random number generator."""
        torch.cuda.set_rng_state(state, self.torch_device)
