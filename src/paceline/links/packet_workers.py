"""Start workers on this machine, and exchange packets over sockets and files in memory.

    workers = PacketWorkers("package.module", deadline_s) # deadline of a worker's answer
    process, wire = workers.launch(settings, fds)         # python -m package.module WIRE
    workers.add(PacketWorker(0, process, wire))
    for worker, message, why in workers.poll():           # why: the reason if a worker is lost
        ...

    settings, wire = Wire.to_starter(sys.argv[1])         # in the worker

A packet takes a tenth of the time of a message over TCP. An empty packet means that the process has
ended. Messages are pickled, which is safe, because one process has started the other.
"""

import os
import pickle
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from paceline.core.error_lines import error_line
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.links.processes import Process, reason
from paceline.links.worker_signals import WorkerSignals, report_signals

_START_S = 120.0  # deadline for a worker to import torch on a busy machine
_STOP_S = 10.0  # deadline for a worker to write its final value and end
_POLL_S = 0.5
_MOST_NBYTES = 1 << 17  # size limit of a packet; the kernel allows 200 KB
_MOST_TEXT = 4096


class Failure(NamedTuple):
    """A worker's error in one line; `by_input`: whether the user's input caused the error."""

    by_input: bool
    reason: str

    @classmethod
    def of(cls, error: BaseException, number: int) -> Self:
        """Create the failure from an error of worker `number`."""
        line = " ".join(error_line(error, number).split())
        return cls(isinstance(error, InvalidInput), line[:_MOST_TEXT])


class Wire:
    """One end of a socket between two processes, and their shared file in memory.

    A pickled message must fit into one packet. Larger values go into the file, which only one
    process may access at a time.
    """

    def __init__(self, connection: socket.socket, file: int) -> None:
        self._socket, self._file = connection, file

    @classmethod
    def to_starter(cls, argument: str) -> tuple[Any, Self]:
        """Return this worker's settings, and its wire to the process that started it.

        `argument`: the worker's only command-line argument.
        """
        report_signals()
        connection, file = map(int, argument.split(","))
        wire = cls(socket.socket(fileno=connection), file)
        return wire.read(), wire

    def fileno(self) -> int:
        """Return a descriptor that is readable once a message has arrived."""
        return self._socket.fileno()

    def send(self, message: object) -> None:
        """Send a message; raise ConnectionError if the other end is closed."""
        self._socket.send(pickle.dumps(message))

    def receive(self, *, waits: bool = True) -> Any:
        """Return the next message, or None if the other end is closed.

        Without `waits`, raises BlockingIOError if no message has arrived.
        """
        packet = b""
        with suppress(ConnectionError):
            packet = self._socket.recv(_MOST_NBYTES, 0 if waits else socket.MSG_DONTWAIT)
        return pickle.loads(packet) if packet else None  # noqa: S301 - from our own process

    def write(self, value: object) -> None:
        """Write a value with tensors to the file; raise InvalidInput if memory is too small."""
        try:
            with os.fdopen(os.dup(self._file), "wb") as file:
                file.seek(0)
                file.truncate()
                torch.save(value, file)
        except OSError as error:
            problem = f"must be fewer, for lack of memory: {error.strerror}"
            raise InvalidInput("workers", problem) from error

    def read(self) -> Any:
        """Return a copy of the last written value."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            return torch.load(file, weights_only=False)

    def close(self) -> None:
        """Close this end of the socket."""
        self._socket.close()


@dataclass(eq=False)
class PacketWorker:
    """A worker process, and this process's wire to it.

    `awaited_since_s`: monotonic time when the wait for the worker's answer began; inf: no wait.
    """

    number: int
    process: Process
    wire: Wire
    is_ready: bool = False
    is_ended: bool = False
    awaited_since_s: float = field(default_factory=time.monotonic)

    @property
    def title(self) -> str:
        """The worker's name in messages."""
        return f"worker {self.number} (process {self.process.pid})"

    def send(self, message: object) -> None:
        """Send a message and expect an answer; if the process has ended, `poll` reports it."""
        self.awaited_since_s = time.monotonic()
        with suppress(ConnectionError):
            self.wire.send(message)


W = TypeVar("W", bound=PacketWorker)


class PacketWorkers(Generic[W]):
    """Workers that run `module`; a worker that does not answer within `deadline_s` is lost."""

    def __init__(self, module: str, deadline_s: float) -> None:
        self._module, self._deadline_s = module, deadline_s
        self._files = ExitStack()  # closes the workers' files, the signal pipe and the selector
        self._signals = WorkerSignals()
        self._files.callback(self._signals.close)
        self._selector = self._files.enter_context(selectors.DefaultSelector())
        self._checked_s = 0.0
        self.workers: list[W] = []  # in the order of their starts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.running:
            self._close(worker)
        self._files.close()

    @property
    def running(self) -> list[W]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if not worker.is_ended]

    def launch(self, settings: object, fds: Sequence[int]) -> tuple[Process, Wire]:
        """Start a process that inherits `fds` and reads `settings`; return it and its wire."""
        file = os.memfd_create("paceline-worker", os.MFD_CLOEXEC)
        self._files.callback(os.close, file)
        os.fchmod(file, 0o600)
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wire = Wire(own, file)
        wire.write(settings)
        try:
            with other:
                fds = other.fileno(), file, *fds
                argument = f"{other.fileno()},{file}"
                return self._signals.start(self._module, argument, fds, OMP_NUM_THREADS="1"), wire
        except OSError:
            own.close()
            raise

    def add(self, worker: W) -> None:
        """Add a launched worker to the workers that `poll` watches."""
        self.workers.append(worker)
        self._selector.register(worker.wire, selectors.EVENT_READ, worker)

    def poll(self) -> Iterator[tuple[W, Any, str]]:
        """Wait up to half a second for messages; yield tuples (worker, message, why).

        If a worker is lost, `message` is None and `why` the reason, such as "was ended by
        SIGKILL"; otherwise `why` is "".
        Raises InvalidInput or WorkerLost if a worker reports its failure.
        """
        for key, _ in self._selector.select(_POLL_S):
            worker: W = key.data
            if worker.is_ended:  # the caller ended this worker after another worker's message
                continue
            message, worker.awaited_since_s, worker.is_ready = worker.wire.receive(), inf, True
            if isinstance(message, Failure):
                why = f"{worker.title} failed: {message.reason}"
                raise InvalidInput.of(why) if message.by_input else WorkerLost(why)
            yield worker, message, self.end(worker) if message is None else ""
        # Check for signals and silent workers only twice a second, not after each of thousands of
        # packets per second.
        now_s = time.monotonic()
        if now_s < self._checked_s:
            return
        self._checked_s = now_s + _POLL_S
        self._signals.poll({one.process.pid: f"worker {one.number}" for one in self.running})
        for worker in self.running:
            allowed_s = self._deadline_s if worker.is_ready else _START_S
            if now_s - worker.awaited_since_s > allowed_s:
                self.end(worker)
                yield worker, None, f"did not answer within {allowed_s:g} s"

    def end(self, worker: W) -> str:
        """Kill a worker, if it runs; return how it ended, such as "was ended by SIGKILL"."""
        self._selector.unregister(worker.wire)
        self._close(worker)
        self._signals.ended(worker.process, f"worker {worker.number}")
        return reason(worker.process.poll())

    def _close(self, worker: W) -> None:
        worker.is_ended = True
        worker.wire.close()
        worker.process.close()

    def stop(self, message: object) -> list[Any]:
        """End the running workers by sending `message`; return their final values.

        The value of a worker that fails is None.
        """
        stopped = self.running
        for worker in stopped:  # send to all before waiting, so that they end in parallel
            worker.send(message)
        for worker in stopped:
            worker.process.wait(_STOP_S)
            self.end(worker)
        return [one.wire.read() if one.process.poll() == 0 else None for one in stopped]
