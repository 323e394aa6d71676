"""A GPU that is simulated on the host's memory: work with streams can be tested without a real one.

    device = devices(1)[0]             # of `tensors`
    model.to(device.torch_device)      # torch.device("simulated", 0)

Tensors on it are torch's in all but memory: autograd runs their hooks in a thread of the device's,
as on a GPU. Each operation returns at once, its result unwritten; the stream that was current does
it later, in a thread of its own, after a random time. What CUDA leaves undefined is an error here:
work that touches memory which another stream may not have done with, memory given back too early.
Results are poison until they are written: NaN, or -1.

Copies between the device and host memory that is not pinned, or of another layout, make the host
wait, as on CUDA; `num_blocking_copies` counts them. `commands` counts kernels, copies ("h2d",
"d2h") and waits of the host ("sync").
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
from torch import Tensor
from torch.profiler import ProfilerActivity

from paceline.core.machine import DeviceKind
from paceline.links.devices.device import Event, Stream
from simulated_gpu.guard import guard
from simulated_gpu.ordering import Access, Block, Clock, merge

NAME = "simulated"
_MOST_DELAY_S = 2e-4
_DEADLINE_S = 120.0
_MOST_STREAMS = 32  # of torch's pool of CUDA's streams
_POISON = 0xFF
COPIES = ("h2d", "d2h")
_numbers = itertools.count(1)  # 0 is the default stream of every device
Delays = Callable[["SimulatedStream", str], float]


class RaceError(RuntimeError):
    """Work of two streams touches the same memory in no order that is known."""


class _Work(NamedTuple):
    """A piece of work, and how long it takes; it does not begin before `after` is reached."""

    call: Callable[[], object]
    delay_s: float = 0.0
    after: threading.Event | None = None


class Memory(NamedTuple):
    """Bytes `start` to `end` of a block."""

    block: Block
    start: int
    end: int


class SimulatedEvent:
    """An event, with what its stream knew when it was recorded."""

    def __init__(self, device: "SimulatedDevice", clock: Clock) -> None:
        self._device, self.clock = device, clock
        self.reached = threading.Event()
        self.reached_s = 0.0

    @property
    def is_reached(self) -> bool:
        """True once it is reached; the host is not ordered after it before it synchronizes."""
        return self.reached.is_set()

    def happen(self) -> None:
        """Be reached, now."""
        self.reached_s = time.monotonic()
        self.reached.set()

    def synchronize(self) -> None:
        """Wait on the host until it is reached; raise what has failed on the device."""
        self.await_reached()
        self._device.check()

    def await_reached(self) -> None:
        """Wait on the host until it is reached, whatever has failed."""
        if not self.reached.wait(_DEADLINE_S):
            raise RuntimeError(f"the simulated device does not answer within {_DEADLINE_S:g} s")
        with self._device.lock:
            merge(self._device.host_clock, self.clock)
            self._device.commands["sync"] += 1

    def seconds_after(self, earlier: Event) -> float:
        """Return the seconds between two events that are reached."""
        assert isinstance(earlier, SimulatedEvent)
        if not (self.reached.is_set() and earlier.reached.is_set()):
            raise RuntimeError("an event is not reached yet, so that its time is unknown")
        return self.reached_s - earlier.reached_s


class SimulatedStream:
    """A stream: a thread with a queue."""

    def __init__(self, device: "SimulatedDevice", number: int | None = None) -> None:
        self.number = next(_numbers) if number is None else number
        self.device = device
        self.clock: Clock = {}
        self._queue: queue.SimpleQueue[_Work] = queue.SimpleQueue()
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
        """Queue work of `count` commands that reads memory, and writes that which comes with True.

        Raises RaceError if other streams may not have done with it.
        """
        device = self.device
        delay_s = device.delays(self, what)
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
                self._queue.put(_Work(call, delay_s))
        device.check()

    def run_last(self, call: Callable[[], object]) -> None:
        """Queue work that nothing else is to be ordered with."""
        self._queue.put(_Work(call))

    def record(self, *, timed: bool = False) -> SimulatedEvent:
        """Return an event behind all work that is queued here now."""
        with self.device.lock:
            merge(self.clock, self.device.host_clock)
            event = SimulatedEvent(self.device, dict(self.clock))
            self._queue.put(_Work(event.happen))
        return event

    def wait(self, event: Event) -> None:
        """Begin later work only when the event is reached."""
        assert isinstance(event, SimulatedEvent)
        with self.device.lock:
            merge(self.clock, event.clock)
            self._queue.put(_Work(nothing, after=event.reached))

    def wait_stream(self, other: Stream) -> None:
        """Begin later work after all that is queued in the other stream now."""
        self.wait(other.record())

    def synchronize(self) -> None:
        """Wait on the host until all work queued here is done; raise what has failed."""
        self.record().synchronize()

    def keep(self, tensor: Tensor) -> None:
        """Keep the tensor's memory from reuse until this stream has done with it."""
        memory: Memory = tensor.memory  # type: ignore[attr-defined] # a SimulatedTensor's
        memory.block.users.add(self.number)


def _run(queued: "queue.SimpleQueue[_Work]", device: "SimulatedDevice") -> None:
    torch.set_grad_enabled(False)
    while True:
        work = queued.get()
        if work.after is not None and not work.after.wait(_DEADLINE_S):
            device.report(f"a stream waited {_DEADLINE_S:g} s for an event")
        if work.delay_s > 0:
            time.sleep(work.delay_s)
        try:
            work.call()
        except Exception as error:
            device.errors.append(error)
        del work  # and what it holds


def nothing() -> None:
    """Do nothing."""


class SimulatedDevice:
    """A simulated GPU.

    `delays`: the seconds that a piece of work takes, given its stream and what it does: the name of
    an operation, "h2d" or "d2h". By default they are random.
    """

    kind = DeviceKind.GPU
    is_asynchronous = True
    name = "simulated on the host's memory"
    backend = "gloo"
    has_triton = False
    profiled: tuple[ProfilerActivity, ...] = ()

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device(NAME, index)
        self.lock = threading.RLock()
        self.host_clock: Clock = {}
        self.errors: list[Exception] = []
        self.num_blocking_copies = 0
        self.commands: Counter[str] = Counter()
        generator = random.Random(index)
        self.delays: Delays = lambda stream, what: generator.uniform(0.0, _MOST_DELAY_S)
        self._pinned: dict[int, tuple[int, Block]] = {}  # by address: the end, and the block
        default = SimulatedStream(self, 0)
        self._streams = {0: default}
        self._num_asked = 0

    def new_stream(self) -> SimulatedStream:
        """Return a new stream, or the one of those that has waited longest: there are so many."""
        if len(self._streams) <= _MOST_STREAMS:
            stream = SimulatedStream(self)
            self._streams[stream.number] = stream
            return stream
        self._num_asked += 1
        return list(self._streams.values())[1 + self._num_asked % _MOST_STREAMS]

    def current_stream(self) -> SimulatedStream:
        """Return the stream in which this thread queues work."""
        number: int = guard().get_stream(self.torch_device.index)
        return self._streams[number]

    @contextmanager
    def use(self, stream: Stream | None = None) -> Iterator[None]:
        """Make this device, and one of its streams, those of this thread for a while."""
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
        """Return the stream with that number."""
        return self._streams[number]

    def synchronize(self) -> None:
        """Wait until all work in all streams is done; raise what has failed."""
        self.await_all()
        self.check()

    def await_all(self) -> None:
        """Wait until all work in all streams is done, whatever has failed."""
        for event in [stream.record() for stream in self._streams.values()]:
            event.await_reached()

    def memory_nbytes(self) -> tuple[int, int] | None:
        """Return None: its memory is the host's."""
        return None

    def limit_memory(self, nbytes: int) -> None:
        """Do nothing: it is the host's."""

    def reaches(self, other: torch.device) -> bool:
        """Return False: copies between simulated GPUs are not simulated."""
        return False

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory; return what undoes it."""
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
        """Return a new tensor in pinned host memory, of the same shape, strides and type."""
        found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        poison(found)
        if address := found.data_ptr():
            self._pinned[address] = address + found.nbytes, Block()
            weakref.finalize(found.untyped_storage(), self._pinned.pop, address)
        return found

    def random_state(self) -> Tensor | None:
        """Return None: random numbers are the host's."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Do nothing."""

    def report(self, race: str | None) -> None:
        """Keep a race, if there is one, to be raised where the host waits or queues work next."""
        if race is not None:
            self.errors.append(RaceError(race))

    def check(self) -> None:
        """Raise the first error of work that was queued before."""
        if self.errors:
            raise self.errors[0]

    def has_arrived(self, memory: Tensor) -> bool:
        """Return True if the host knows that all copies to this host memory are done."""
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
        """Return the place of host memory in what is pinned; None if it is not."""
        first, nbytes = memory.data_ptr(), extent_nbytes(memory)
        for start, (end, block) in list(self._pinned.items()):
            if start <= first and first + nbytes <= end:
                return Memory(block, first - start, first - start + nbytes)
        return None

    def free(self, block: Block, raw: Tensor) -> None:
        """Give memory back, which is poisoned once its own stream and those that keep it are done.

        A race is reported if yet another stream may still use it.
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
    """Fill all memory that a tensor lies in with NaN, or -1: a byte of ones is both."""
    flat = torch.empty(0, dtype=torch.uint8).set_(raw.untyped_storage())
    flat.fill_(_POISON)
