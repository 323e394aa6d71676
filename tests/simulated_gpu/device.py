"""Simulate a GPU in host memory, to test code with streams without a real GPU.

    device = devices(1)[0]             # from `tensors`
    model.to(device.torch_device)      # torch.device("simulated", 0)

torch treats tensors on a simulated device as on any device: autograd runs their hooks in a thread
of the device, as on a GPU. Each operation returns immediately, before its result is written. A
thread of the current stream executes the operation after a random delay. Undefined behaviour of
CUDA is an error here: work on memory that another stream may still use, and memory freed too early.
Until results are written, they contain NaN or -1.

As on CUDA, the host waits for a copy between the device and host memory if the host memory is not
pinned or has another layout; `num_blocking_copies` counts these copies. `commands` counts kernels,
copies ("h2d", "d2h") and waits of the host ("sync").
"""

import itertools
import queue
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Event, Stream, Tensor

from paceline.core.machine import DeviceKind
from paceline.links.devices import Device
from simulated_gpu.guard import guard
from simulated_gpu.ordering import Access, Block, Clock, merge

NAME = "simulated"
_MOST_DELAY_S = 2e-4
_DEADLINE_S = 120.0
_MOST_STREAMS = 32  # as in torch's pool of CUDA streams
_POISON = 0xFF
COPIES = ("h2d", "d2h")
_numbers = itertools.count(1)  # 0 is each device's default stream
Delays = Callable[["SimulatedStream", str], float]


class RaceError(RuntimeError):
    """Two streams use the same memory without synchronization."""


class Memory(NamedTuple):
    """The bytes from `start` to `end` of a block."""

    block: Block
    start: int
    end: int


class SimulatedEvent:
    """An event, with the vector clock of its stream when it was recorded."""

    def __init__(self, device: "SimulatedDevice", clock: Clock) -> None:
        self._device, self.clock = device, clock
        self.reached = threading.Event()
        self.reached_s = 0.0

    def query(self) -> bool:
        """Whether the event is reached; only `synchronize` orders later work after the event."""
        return self.reached.is_set()

    def happen(self) -> None:
        """Mark the event as reached."""
        self.reached_s = time.monotonic()
        self.reached.set()

    def hold_up(self) -> None:
        """Let the calling thread, of a stream or the host, wait until the event is reached."""
        if not self.reached.wait(_DEADLINE_S):
            raise RuntimeError(f"an event is not reached within {_DEADLINE_S:g} s")

    def synchronize(self) -> None:
        """Wait on the host until the event is reached; raise the device's first error."""
        self.await_reached()
        self._device.check()

    def await_reached(self) -> None:
        """Wait on the host until the event is reached; raise no error of the device."""
        self.hold_up()
        with self._device.lock:
            merge(self._device.host_clock, self.clock)
            self._device.commands["sync"] += 1

    def elapsed_time(self, end_event: Event, /) -> float:
        """Return the milliseconds between two reached events."""
        assert isinstance(end_event, SimulatedEvent)
        if not (self.reached.is_set() and end_event.reached.is_set()):
            raise RuntimeError("an event is not reached yet, so that its time is unknown")
        return (end_event.reached_s - self.reached_s) * 1e3


class SimulatedStream:
    """A thread that executes queued work in order."""

    def __init__(self, device: "SimulatedDevice", number: int | None = None) -> None:
        self.number = next(_numbers) if number is None else number
        self.device = device
        self.clock: Clock = {}
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(
            target=_run, args=(self._queue, device), name=f"stream {self.number}", daemon=True
        ).start()

    def put(
        self,
        call: Callable[[], object],
        what: str,
        accesses: Sequence[tuple[Memory, bool]] = (),
        count: int = 1,
    ) -> None:
        """Queue a function that counts as `count` commands.

        `accesses`: the memory that the function uses, with True for writes. Raises RaceError if
        another stream may still use the memory.
        """
        device = self.device
        delay_s = device.delays(self, what)

        def delayed() -> None:
            time.sleep(delay_s)
            call()

        with device.lock:
            device.commands[what if what in COPIES else "kernel"] += count
            merge(self.clock, device.host_clock)
            position = self.clock[self.number] = self.clock.get(self.number, 0) + 1
            found = [
                (
                    memory.block,
                    Access(memory.start, memory.end, self.number, position, writes, what),
                )
                for memory, writes in accesses
            ]
            races = [block.race(access, self.clock) for block, access in found]
            for race in races:
                device.report(race)
            if not any(races):
                for block, access in found:
                    block.add(access, self.clock)
                self._queue.put(delayed)
        device.check()

    def run_last(self, call: Callable[[], object]) -> None:
        """Queue a function without a check for races."""
        self._queue.put(call)

    def record(self) -> SimulatedEvent:
        """Return an event that is reached after all queued work of this stream."""
        with self.device.lock:
            merge(self.clock, self.device.host_clock)
            event = SimulatedEvent(self.device, dict(self.clock))
            self._queue.put(event.happen)
        return event

    def wait_event(self, event: Event, /) -> None:
        """Make later work of this stream wait for the event."""
        assert isinstance(event, SimulatedEvent)
        with self.device.lock:
            merge(self.clock, event.clock)
            self._queue.put(event.hold_up)

    def wait_stream(self, stream: Stream, /) -> None:
        """Make later work of this stream wait for all queued work of the other stream."""
        assert isinstance(stream, SimulatedStream)
        self.wait_event(stream.record())

    def synchronize(self) -> None:
        """Wait on the host for all queued work of this stream; raise the device's first error."""
        self.record().synchronize()

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until this stream has finished its queued work."""
        memory: Memory = tensor.memory  # type: ignore[attr-defined] # a SimulatedTensor's
        memory.block.users.add(self.number)


def _run(queued: "queue.SimpleQueue[Callable[[], object]]", device: "SimulatedDevice") -> None:
    torch.set_grad_enabled(False)
    while True:
        call = queued.get()
        try:
            call()
        except Exception as error:
            device.errors.append(error)
        del call  # release the tensors that it references


def nothing() -> None:
    """Do nothing."""


class SimulatedDevice(Device):
    """A simulated GPU.

    `delays(stream, what)`: returns the seconds of delay before a piece of work; by default they
    are random. `what` is the name of an operation, "h2d" or "d2h".
    """

    kind = DeviceKind.GPU
    is_asynchronous = True
    name = "simulated on the host's memory"

    def __init__(self, index: int) -> None:
        super().__init__(torch.device(NAME, index))
        self.lock = threading.RLock()
        self.host_clock: Clock = {}
        self.errors: list[Exception] = []
        self.num_blocking_copies = 0
        self.commands: Counter[str] = Counter()
        generator = random.Random(index)
        self.delays: Delays = lambda stream, what: generator.uniform(0.0, _MOST_DELAY_S)
        self._pinned: dict[int, tuple[int, Block]] = {}  # start address: (end, block)
        default = SimulatedStream(self, 0)
        self._streams = {0: default}
        self._num_asked = 0

    def new_stream(self) -> SimulatedStream:
        """Return a new stream; reuse streams in turn once the pool is full."""
        if len(self._streams) <= _MOST_STREAMS:
            stream = SimulatedStream(self)
            self._streams[stream.number] = stream
            return stream
        self._num_asked += 1
        return list(self._streams.values())[1 + self._num_asked % _MOST_STREAMS]

    def current_stream(self) -> SimulatedStream:
        """Return this thread's current stream."""
        number: int = guard().get_stream(self.torch_device.index)
        return self._streams[number]

    def record(self, *, timed: bool = False) -> SimulatedEvent:
        """Record an event in the current stream."""
        return self.current_stream().record()

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor's memory until the current stream has finished its queued work."""
        self.current_stream().keep(tensor)

    @contextmanager
    def use(self, stream: Stream | None = None) -> Iterator[None]:
        """Make this device, and optionally one of its streams, current within the block."""
        index, device = self.torch_device.index, guard().get_device()
        before = guard().get_stream(index)
        guard().set_device(index)
        if stream is not None:
            assert isinstance(stream, SimulatedStream)
            guard().set_stream(index, stream.number)
        try:
            yield
        finally:
            guard().set_stream(index, before)
            guard().set_device(device)

    def stream(self, number: int) -> SimulatedStream:
        """Return the stream with this number."""
        return self._streams[number]

    def synchronize(self) -> None:
        """Wait until all work of all streams is done; raise the first error."""
        self.await_all()
        self.check()

    def await_all(self) -> None:
        """Wait until all work of all streams is done; raise no error."""
        for event in [stream.record() for stream in self._streams.values()]:
            event.await_reached()

    def limit_memory(self, nbytes: int) -> None:
        """Do nothing, because tensors are in host memory."""

    def reaches(self, other: torch.device) -> bool:
        """Return False, because copies between GPUs are not simulated."""
        return False

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory; return a function that unpins it."""
        address = memory.data_ptr()
        with self.lock:
            if self.pinned(memory) is not None:
                raise RuntimeError("this memory is pinned already")
            self._pinned[address] = address + memory.nbytes, Block()
        return lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        with self.lock:
            _, block = self._pinned.pop(address)
            if not all(access.is_before(self.host_clock) for access in block.accesses):
                self.report("memory is unpinned while copies may still use it: synchronize before")
        self.check()

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in pinned host memory, with equal shape, strides and dtype."""
        found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        poison(found)
        if address := found.data_ptr():
            self._pinned[address] = address + found.nbytes, Block()
            weakref.finalize(found.untyped_storage(), self._pinned.pop, address)
        return found

    def report(self, race: str | None) -> None:
        """Store a race, if any; the host's next wait or queued work raises it."""
        if race is not None:
            self.errors.append(RaceError(race))

    def check(self) -> None:
        """Raise the first error of earlier work, if any."""
        if self.errors:
            raise self.errors[0]

    def has_arrived(self, memory: Tensor) -> bool:
        """Whether the host has synchronized with all copies to this host memory."""
        found = self.pinned(memory)
        if found is None:
            return True
        with self.lock:
            return all(
                one.is_before(self.host_clock)
                for one in found.block.accesses
                if one.writes and one.start < found.end and found.start < one.end
            )

    def pinned(self, memory: Tensor) -> Memory | None:
        """Return the pinned block and range that contain this host memory; None if not pinned."""
        first, nbytes = memory.data_ptr(), extent_nbytes(memory)
        for start, (end, block) in list(self._pinned.items()):
            if start <= first and first + nbytes <= end:
                return Memory(block, first - start, first - start + nbytes)
        return None

    def free(self, block: Block, raw: Tensor) -> None:
        """Free memory: poison it after the work of its stream and of streams that `keep` it.

        Reports a race if another stream may still use the memory.
        """
        with self.lock:
            own = self._streams[block.stream]
            for user in block.users:
                own.wait_stream(self._streams[user])
            merge(own.clock, self.host_clock)
            self.report(block.free(own.clock))
            own.run_last(partial(poison, raw))


def extent_nbytes(tensor: Tensor) -> int:
    """Return the bytes from the first to the last value of a strided tensor."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def poison(raw: Tensor) -> None:
    """Fill a tensor's whole storage with bits of 1, which are NaN or -1."""
    flat = torch.empty(0, dtype=torch.uint8).set_(raw.untyped_storage())
    flat.fill_(_POISON)
