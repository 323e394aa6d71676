"""A worker as the coordinator sees it: its process, its socket, and how far it is."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from paceline.core.plan import Kind, Resource
from paceline.core.timeline import Span
from paceline.links.launch import KEEPING_MEMORY
from paceline.links.shared_tensors import SharedTensors
from paceline.strategies.hogbatch.messages import MOST_NBYTES, ExecuteWork
from paceline.strategies.hogbatch.policy import Worker
from paceline.strategies.hogbatch.worker import Employment, Learning, Memory
from paceline.strategies.hogbatch.workers import WorkerSpec

_MODULE = "paceline.strategies.hogbatch.worker"
_ENDING_S = 10.0
_STANDARD_ERROR = 2


@dataclass(eq=False)
class Hand:
    """A worker as the coordinator sees it. `speed` is in samples/s, None before it was tried.

    `updates` are as the policy counts them; `size` is what the policy last said. `given` is what it
    works on, and what comes after that. `missed` is how many updates of others its latest batch has
    missed, and `seen` how many there were of all when it began its batch. While it is `awaited`, it
    has been silent since `silent_since_s`.
    """

    number: int
    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    wire: socket.socket
    trace: int
    given: deque[ExecuteWork] = field(default_factory=deque)
    to_try: list[int] = field(default_factory=list)
    tried: dict[int, float] = field(default_factory=dict)
    speed: float | None = None
    is_ready: bool = False
    is_gone: bool = False
    updates: float = 0.0
    size: int = 0
    seen: int = 0
    missed: int = 0
    num_traced: int = 0
    latest: tuple[int, float] = (1, inf)  # samples of a batch, and the seconds it took
    is_awaited: bool = True
    silent_since_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """What its device is called in plans and results."""
        return self.spec.name(self.number)

    @property
    def title(self) -> str:
        """How messages call it."""
        return f"worker {self.number} ({self.spec}, process {self.process.pid})"

    @property
    def as_worker(self) -> Worker:
        """What a policy knows of it."""
        return Worker(self.spec.kind, self.spec.threads, self.speed or 1.0)

    @property
    def work(self) -> ExecuteWork | None:
        """What it works on, if on samples."""
        return self.given[0] if self.given else None

    def took(self, size: int, seconds: float) -> None:
        """Note how long a batch took."""
        self.latest = (size, seconds)

    def seconds(self, size: int) -> float:
        """Return what a batch is expected to take: a smaller one than the latest as long."""
        latest, seconds = self.latest
        return seconds * max(1.0, size / latest)

    def give(self, work: ExecuteWork) -> None:
        """Have it train on samples, after what it has been given before."""
        self.given.append(work)
        self.tell(work)

    def has_done(self) -> None:
        """Note that it is done with what it works on, and goes on with the next, if it has one."""
        self.given.popleft()
        self.is_awaited, self.silent_since_s = bool(self.given), time.monotonic()

    def tell(self, work: ExecuteWork) -> None:
        """Send it a message. Of a worker that is gone the socket will say so by itself."""
        self.is_awaited, self.silent_since_s = True, time.monotonic()
        with suppress(ConnectionError):
            self.wire.send(work.packed())

    def hear(self) -> bytes:
        """Return its message; nothing if it is gone."""
        self.is_awaited = False
        try:
            return self.wire.recv(MOST_NBYTES)
        except ConnectionError:
            return b""

    def end(self) -> str:
        """End the process, if it runs, and say how it ended."""
        self.is_gone = True
        self.wire.close()
        if self.process.poll() is None:
            self.process.kill()
        code = self.process.wait()
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def leave(self) -> tuple[int, list[Span]]:
        """Wait until it has ended, as it was told: return its peak memory, and its spans."""
        try:
            self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.end()
        with os.fdopen(os.dup(self.trace)) as file:
            file.seek(0)
            text = file.read()
        if not text:
            return 0, []
        left = json.loads(text)
        return left["peak_memory_bytes"], [_span(row) for row in left["spans"]]

    def forget(self) -> None:
        """Close what is left of it."""
        os.close(self.trace)


def _span(row: Sequence[Any]) -> Span:
    name, kind, on, start_s, end_s, part = row
    return Span(name, Kind(kind), tuple(Resource(*lane) for lane in on), start_s, end_s, part)


def start(
    number: int,
    spec: WorkerSpec,
    cores: tuple[int, ...],
    learning: Learning,
    model: SharedTensors,
    data: SharedTensors,
) -> Hand:
    """Start a worker's process, and return it with our end of its socket."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    trace = os.memfd_create("paceline-trace", os.MFD_CLOEXEC)
    os.fchmod(trace, 0o600)
    employment = Employment(
        number=number,
        kind=spec.kind,
        threads=spec.threads,
        index=spec.index,
        slow=spec.slow,
        cores=cores,
        launcher=os.getpid(),
        learning=learning,
        socket=other.fileno(),
        trace=trace,
        model=Memory(fd=model.fd, entries=model.entries),
        data=Memory(fd=data.fd, entries=data.entries),
    )
    command = [sys.executable, "-m", _MODULE, employment.model_dump_json()]
    try:
        with other:
            process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                env=KEEPING_MEMORY | os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,  # standard output holds the result, and nothing else
                pass_fds=(other.fileno(), trace, model.fd, data.fd),
            )
    except OSError:
        own.close()
        os.close(trace)
        raise
    return Hand(number, spec, process, own, trace)
