"""NVIDIA's GPUs, by torch.cuda."""

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.links.devices.device import Event, Stream

_DEVICE_FILES = Path("/dev")
_FORK_S = 30.0  # for a process that was forked to answer, on a busy machine
_HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES by which a person hides all GPUs


def gpus() -> tuple[torch.device, ...]:
    """Return NVIDIA's GPUs that this process sees; InvalidInput if they cannot be used."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")  # torch warns of a driver that is too old, and goes on
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_usable = _checked(count, [str(one.message) for one in found])
    return tuple(torch.device("cuda", index) for index in range(num_usable))


def num_gpus() -> int:
    """Return the number of NVIDIA's GPUs, as their driver tells it without initialising CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether they can be used is for `gpus` to say
        count = torch.cuda.device_count()
    return _checked(count, ())


def can_fork() -> bool:
    """Return True if a process that is forked from this one can use GPUs.

    It cannot if this one has initialised CUDA, which torch tells in the forked process only; nor if
    what a library does in each fork hangs there.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(is_lost())
    pidfd = os.pidfd_open(pid)
    try:
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        if not ended.poll(_FORK_S * 1e3):
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(pidfd)
    return os.waitpid(pid, 0)[1] == 0


def is_lost() -> bool:
    """Return True, in a process that was forked, if CUDA was initialised before."""
    return bool(torch.cuda._is_in_bad_fork())


def _checked(count: int, warned: Sequence[str]) -> int:
    """Return the number of GPUs that torch finds; InvalidInput if there are others only."""
    if count == 0 and (why := _why_unusable(warned)):
        raise InvalidInput(
            "device",
            f"this machine has a GPU that cannot be used: {why}",
            hint="mend that, or hide the GPU with CUDA_VISIBLE_DEVICES= to compute on CPU cores",
        )
    return count


def _why_unusable(warned: Sequence[str]) -> str | None:
    """Return why torch cannot use a GPU that this machine has; None if it has none, or hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return None
    if not any(_DEVICE_FILES.glob("nvidia[0-9]*")):
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    reasons = [text.partition("(Triggered")[0].strip() for text in warned]
    return next(iter(reasons), "torch finds no CUDA device")


class CudaEvent:
    """An event of CUDA."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        # blocking: the waiting thread sleeps, where spinning would take a core from others
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)
        self.event.record(stream)

    @property
    def is_reached(self) -> bool:
        """True once it is reached."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait on the host until it is reached."""
        self.event.synchronize()

    def seconds_after(self, earlier: Event) -> float:
        """Return the seconds between two events, as exact as a float32 of milliseconds is."""
        assert isinstance(earlier, CudaEvent)
        elapsed_ms: float = earlier.event.elapsed_time(self.event)
        return elapsed_ms * 1e-3


class CudaStream:
    """A stream of CUDA."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self, *, timed: bool = False) -> CudaEvent:
        """Return an event behind all work that is queued here now."""
        return CudaEvent(self.stream, timed)

    def wait(self, event: Event) -> None:
        """Begin later work only when the event is reached."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def wait_stream(self, other: Stream) -> None:
        """Begin later work after all that is queued in the other stream now."""
        assert isinstance(other, CudaStream)
        self.stream.wait_stream(other.stream)

    def synchronize(self) -> None:
        """Wait on the host until all work queued here is done."""
        self.stream.synchronize()

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until this stream has done with it."""
        tensor.record_stream(self.stream)


class CudaDevice:
    """A GPU of this process. Making this object does not touch it."""

    kind = DeviceKind.GPU
    is_asynchronous = True
    backend = "nccl"
    has_triton = True
    profiled: tuple[ProfilerActivity, ...] = (ProfilerActivity.CUDA,)

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    @cached_property
    def name(self) -> str:
        """The name of the product."""
        return torch.cuda.get_device_name(self.torch_device)

    def new_stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(torch.cuda.Stream(self.torch_device))

    def current_stream(self) -> CudaStream:
        """Return the stream in which this thread queues work for this GPU."""
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def use(self, stream: Stream | None = None) -> AbstractContextManager[object]:
        """Make this GPU, and one of its streams, those of this thread for a while."""
        if stream is None:
            return torch.cuda.device(self.torch_device)
        assert isinstance(stream, CudaStream)
        return self._in(stream)

    @contextmanager
    def _in(self, stream: CudaStream) -> Iterator[None]:
        # A stream's context restores the stream of the device that was current before: both.
        with torch.cuda.device(self.torch_device), torch.cuda.stream(stream.stream):
            yield

    def synchronize(self) -> None:
        """Wait until all work that is queued in all streams is done."""
        torch.cuda.synchronize(self.torch_device)

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return the bytes of the GPU's memory that no process has taken, and all of them."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free, int(torch.cuda.get_device_properties(self.torch_device).total_memory)

    def limit_memory(self, nbytes: int) -> None:
        """Refuse this process more than so much of the GPU's memory."""
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.torch_device)

    def reaches(self, other: torch.device) -> bool:
        """Return True if there is peer access to another GPU."""
        return torch.cuda.can_device_access_peer(self.torch_device, other)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory; return what undoes it. InvalidInput if there is not enough of it."""
        runtime, check = torch.cuda.cudart(), torch.cuda.check_error
        address, nbytes = memory.data_ptr(), memory.nbytes
        with self._pinning(nbytes):
            check(runtime.cudaHostRegister(address, nbytes, 0))

        def unpin() -> None:
            with self.use():
                check(runtime.cudaHostUnregister(address))

        return unpin

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, of the same shape, strides and type."""
        with self._pinning(tensor.nbytes):
            return torch.empty_like(tensor, device="cpu", pin_memory=True)

    @contextmanager
    def _pinning(self, nbytes: int) -> Iterator[None]:
        with self.use():  # or a context would be made on GPU 0
            try:
                yield
            except RuntimeError as error:
                raise InvalidInput(
                    "device",
                    f"{nbytes:,} bytes of host memory cannot be pinned for {self.torch_device}: "
                    f"{str(error).splitlines()[0]}",
                    hint="free memory, or use fewer workers",
                ) from None

    def random_state(self) -> Tensor | None:
        """Return the state of the GPU's random numbers."""
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: Tensor) -> None:
        """Set the state of the GPU's random numbers."""
        torch.cuda.set_rng_state(state, self.torch_device)
