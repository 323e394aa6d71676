"""The worker processes of a run: started on cores of their own, polled in one loop, and ended."""

import logging
import os
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.timeline import Span
from paceline.links.cores import physical_cores
from paceline.links.files import limits
from paceline.links.files.reading import read_record_file
from paceline.links.processes import STANDARD_ERROR, Process, module_command, reason, start
from paceline.links.worker_signals import SignalsOfWorkers
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, Training
from paceline.strategies.hogbatch.progress import PastWorker
from paceline.strategies.hogbatch.scheduler import WorkerProgress
from paceline.strategies.hogbatch.speed_trial import SpeedTrial

logger = logging.getLogger(__name__)

_MODULE = "paceline.strategies.hogbatch.worker"
_START_S = 120.0  # to import torch on a machine that is busy
_STOP_S = 10.0  # to write its spans
_POLL_S = 0.5


class Written(NamedTuple):
    """What a worker writes at its end: its peak of memory, and its traced spans."""

    peak_memory_bytes: Annotated[int, Field(ge=0)]
    spans: tuple[Span, ...]


_WRITTEN = TypeAdapter(Written)


@dataclass(eq=False)
class WorkerProcess:
    """A worker process, as the coordinator knows it: its progress, its socket and its files.

    Its spans go to the file in memory `trace`, and its state to `state`, for which it was asked
    while `is_asked`. `tried`: the seconds of batches by their sizes. While it is awaited, it has
    been silent since `awaited_since_s`.
    """

    progress: WorkerProgress
    process: Process
    socket: socket.socket
    trace: int
    state: int
    tried: dict[int, float] = field(default_factory=dict)
    is_ready: bool = False
    is_asked: bool = False
    is_ended: bool = False
    awaited_since_s: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The name of its device in plans and results."""
        return self.progress.spec.name(self.progress.number)

    @property
    def title(self) -> str:
        """Its name in messages to the user."""
        own = self.progress
        return f"worker {own.number} ({own.spec}, process {self.process.pid})"

    @property
    def trial(self) -> SpeedTrial:
        """The seconds that its batches took in its trials."""
        return SpeedTrial(self.progress.number, self.progress.spec, self.tried)

    @property
    def as_past(self) -> PastWorker:
        """Describes it for a run that goes on without it."""
        own = self.progress
        return PastWorker(self.name, str(own.spec), own.samples_per_s)

    def await_report(self) -> None:
        """Count its silence from now on, if there is work that it will report."""
        self.awaited_since_s = time.monotonic() if self.progress.assigned else inf

    def send(self, work: ExecuteWork) -> None:
        """Send a message. If the process has ended, `poll` tells so later."""
        self.awaited_since_s = time.monotonic()
        with suppress(ConnectionError):
            self.socket.send(work.pack())

    def end(self) -> str:
        """End the process, if it runs, and return how it ended."""
        self.is_ended = True
        self.socket.close()
        self.process.close()
        return reason(self.process.poll())


class WorkerProcesses:
    """The processes that train one model in shared memory.

    A worker that answers later than `deadline_s` after it was sent something is dropped. Use it as
    a context: at its end no worker is left.
    """

    def __init__(self, training: Training, config: Hogbatch, deadline_s: float) -> None:
        self._training, self._config, self._deadline_s = training, config, deadline_s
        self._files = ExitStack()  # descriptors of memory, and a pipe
        self._signals = SignalsOfWorkers()
        self._files.callback(self._signals.close)
        self._selector = selectors.DefaultSelector()
        self._free_cores = physical_cores(os.sched_getaffinity(0))
        self._checked_s = 0.0
        self.workers: list[WorkerProcess] = []  # all that were started here
        self.first_number = 0  # theirs begin behind those of an earlier run

    def __enter__(self) -> "WorkerProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            if not worker.is_ended:
                worker.end()
        self._files.close()
        self._selector.close()

    @property
    def running(self) -> list[WorkerProcess]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if not worker.is_ended]

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker, which may also join later. It asks for work when it is ready."""
        number = self.first_number + len(self.workers)
        if number >= MOST_WORKERS:
            raise InvalidInput("workers", f"at most {MOST_WORKERS} can join a run")
        # Packets keep the borders of messages, and an empty one says that the process has ended.
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Spans and state do not fit into a packet: the worker writes them to files in memory.
        trace, state = self._memory_file("trace"), self._memory_file("state")
        # None if too few cores are left: then the kernel chooses.
        num_cores = 0 if spec.kind == DeviceKind.GPU else spec.threads
        num_cores = num_cores if num_cores <= len(self._free_cores) else 0
        taken, self._free_cores = self._free_cores[:num_cores], self._free_cores[num_cores:]
        settings = messages.ProcessSettings(
            number=number,
            spec=spec,
            depth=self._config.depth_of(spec.kind),
            cores=tuple(cpu for core in taken for cpu in core),
            socket=other.fileno(),
            trace=trace,
            state=state,
            training=self._training,
        )
        memory = (self._training.parameters.fd, self._training.data.fd)
        try:
            with other:
                process = start(
                    module_command(_MODULE, settings.model_dump_json()),
                    environment={"OMP_NUM_THREADS": "1", **self._signals.environment},
                    stdout=STANDARD_ERROR,  # standard output is for the result alone
                    pass_fds=(settings.socket, trace, state, *memory, self._signals.fd),
                )
        except OSError:
            own.close()
            raise
        progress = WorkerProgress(number, spec, settings.depth)
        worker = WorkerProcess(progress, process, own, trace, state)
        self.workers.append(worker)
        self._selector.register(own, selectors.EVENT_READ, worker)

    def _memory_file(self, name: str) -> int:
        """Return the descriptor of a new file in memory, which is closed at the end."""
        fd = os.memfd_create(f"paceline-{name}", os.MFD_CLOEXEC)
        self._files.callback(os.close, fd)
        os.fchmod(fd, 0o600)
        return fd

    def poll(self) -> Iterator[tuple[WorkerProcess, bytes, str]]:
        """Wait for at most half a second; yield workers with their packets, and those lost.

        One that is lost comes with an empty packet, and the end of a sentence that says why.
        """
        for key, _ in self._selector.select(_POLL_S):
            worker: WorkerProcess = key.data
            if worker.is_ended:  # by a packet of another worker in the same round
                continue
            worker.awaited_since_s, packet = inf, b""  # an empty packet: the process has ended
            with suppress(ConnectionError):
                packet = worker.socket.recv(messages.MOST_NBYTES)
            yield worker, packet, "" if packet else self._end(worker)
        # Not for each packet, of which there are thousands a second.
        now_s = time.monotonic()
        if now_s < self._checked_s:
            return
        self._checked_s = now_s + _POLL_S
        named = {one.process.pid: f"worker {one.progress.number}" for one in self.running}
        self._signals.poll(named)
        for worker in self.running:
            allowed_s = self._deadline_s if worker.is_ready else _START_S
            if now_s - worker.awaited_since_s > allowed_s:
                self._end(worker)
                yield worker, b"", f"did not answer within {allowed_s:g} s"

    def _end(self, worker: WorkerProcess) -> str:
        self._selector.unregister(worker.socket)
        ended = worker.end()
        self._signals.ended(worker.process, f"worker {worker.progress.number}")
        return ended

    def stop(self) -> tuple[list[Span], list[int]]:
        """Stop all workers; return their traced spans, and the peak memory of each in bytes."""
        spans: list[Span] = []
        peaks: list[int] = []
        stopped = self.running
        for worker in stopped:  # all before the first is waited for: they end side by side
            worker.send(ExecuteWork(Command.STOP))
        for worker in stopped:
            worker.process.wait(_STOP_S)
            self._end(worker)
            written = _written(worker)
            peaks.append(written.peak_memory_bytes)
            spans += written.spans
        return spans, peaks


def _written(worker: WorkerProcess) -> Written:
    """Return what a worker has left at its end: nothing if it was killed before, or meanwhile."""
    path = Path(f"/proc/self/fd/{worker.trace}")
    if not os.fstat(worker.trace).st_size:
        return Written(0, ())
    try:
        return read_record_file(_WRITTEN, path, limits.TRACE)
    except InvalidInput as error:
        logger.warning("%s: its spans are left out: %s", worker.title, error)
        return Written(0, ())
