"""Worker processes of this machine, each with a socket whose packets are messages.

    with PacketWorkers("package.module", deadline_s, most_nbytes) as workers:
        process, wire = workers.launch(settings_of, fds)     # python -m package.module SETTINGS
        workers.add(PacketWorker(0, process, wire))
        for worker, packet, why in workers.poll():           # why: it was lost
            ...

A packet costs a tenth of a message over TCP, and one that is empty says that the process has ended.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Generic, Self, TypeVar

from paceline.links.processes import STANDARD_ERROR, Process, module_command, reason, start
from paceline.links.worker_signals import SignalsOfWorkers

_START_S = 120.0  # to import torch on a machine that is busy
_POLL_S = 0.5


@dataclass(eq=False)
class PacketWorker:
    """A worker process, and the socket to it. It has been silent since `awaited_since_s`."""

    number: int
    process: Process
    socket: socket.socket
    is_ready: bool = False
    is_ended: bool = False
    awaited_since_s: float = field(default_factory=time.monotonic)

    def send(self, packet: bytes) -> None:
        """Send a message, and await an answer. If the process has ended, `poll` tells so later."""
        self.awaited_since_s = time.monotonic()
        with suppress(ConnectionError):
            self.socket.send(packet)

    def end(self) -> str:
        """End the process, if it runs, and return how it ended."""
        self.is_ended = True
        self.socket.close()
        self.process.close()
        return reason(self.process.poll())


W = TypeVar("W", bound=PacketWorker)


class PacketWorkers(Generic[W]):
    """Processes that run one module, until the end of this context.

    A worker that answers later than `deadline_s` after it was sent something is dropped. Packets
    have at most `most_nbytes`.
    """

    def __init__(self, module: str, deadline_s: float, most_nbytes: int) -> None:
        self._module, self._deadline_s, self._most_nbytes = module, deadline_s, most_nbytes
        self._files = ExitStack()  # descriptors of memory, and a pipe
        self._signals = SignalsOfWorkers()
        self._files.callback(self._signals.close)
        self._selector = selectors.DefaultSelector()
        self._checked_s = 0.0
        self.workers: list[W] = []  # all that were started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.running:
            worker.end()
        self._files.close()
        self._selector.close()

    @property
    def running(self) -> list[W]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if not worker.is_ended]

    def memory_file(self, name: str) -> int:
        """Return the descriptor of a new file in memory, for what does not fit into a packet."""
        fd = os.memfd_create(f"paceline-{name}", os.MFD_CLOEXEC)
        self._files.callback(os.close, fd)
        os.fchmod(fd, 0o600)
        return fd

    def launch(
        self, settings_of: Callable[[int], str], fds: Sequence[int]
    ) -> tuple[Process, socket.socket]:
        """Start a process that inherits `fds`; return it, and this end of its socket.

        Its argument is `settings_of` the descriptor of its end. Raises OSError if it cannot start.
        """
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with other:
                process = start(
                    module_command(self._module, settings_of(other.fileno())),
                    environment={"OMP_NUM_THREADS": "1", **self._signals.environment},
                    stdout=STANDARD_ERROR,  # standard output is for the result alone
                    pass_fds=(other.fileno(), *fds, self._signals.fd),
                )
        except OSError:
            own.close()
            raise
        return process, own

    def add(self, worker: W) -> None:
        """Poll a worker that was launched."""
        self.workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def poll(self) -> Iterator[tuple[W, bytes, str]]:
        """Wait for at most half a second; yield workers with their packets, and those lost.

        One that is lost comes with an empty packet, and the end of a sentence that says why.
        """
        for key, _ in self._selector.select(_POLL_S):
            worker: W = key.data
            if worker.is_ended:  # by a packet of another worker in the same round
                continue
            worker.awaited_since_s, packet = inf, b""  # an empty packet: the process has ended
            with suppress(ConnectionError):
                packet = worker.socket.recv(self._most_nbytes)
            yield worker, packet, "" if packet else self.end(worker)
        # Not for each packet, of which there are thousands a second.
        now_s = time.monotonic()
        if now_s < self._checked_s:
            return
        self._checked_s = now_s + _POLL_S
        self._signals.poll({one.process.pid: f"worker {one.number}" for one in self.running})
        for worker in self.running:
            allowed_s = self._deadline_s if worker.is_ready else _START_S
            if now_s - worker.awaited_since_s > allowed_s:
                self.end(worker)
                yield worker, b"", f"did not answer within {allowed_s:g} s"

    def end(self, worker: W) -> str:
        """End a worker's process, if it runs, and return how it ended."""
        self._selector.unregister(worker.socket)
        ended = worker.end()
        self._signals.ended(worker.process, f"worker {worker.number}")
        return ended
