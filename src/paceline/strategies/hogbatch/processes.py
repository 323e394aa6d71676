"""The worker processes of a run: started on cores of their own, and ended."""

import os
import time
from dataclasses import dataclass, field
from math import inf

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.core.timeline import Span
from paceline.links.cores import physical_cores
from paceline.links.packet_workers import PacketWorker, PacketWorkers
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import (
    MOST_NBYTES,
    Command,
    ExecuteWork,
    ProcessSettings,
    Training,
    left_by,
)
from paceline.strategies.hogbatch.progress import PastWorker
from paceline.strategies.hogbatch.scheduler import WorkerProgress
from paceline.strategies.hogbatch.speed_trial import SpeedTrial

_MODULE = "paceline.strategies.hogbatch.worker"
_STOP_S = 10.0  # to write its spans


@dataclass(eq=False, kw_only=True)
class WorkerProcess(PacketWorker):
    """A worker process, as the coordinator knows it.

    Its state goes to the file in memory `state`, for which it was asked while `is_asked`, and so
    does what it leaves at its end. `tried`: the seconds of batches by their sizes.
    """

    progress: WorkerProgress
    state: int
    tried: dict[int, float] = field(default_factory=dict)
    is_asked: bool = False

    @property
    def name(self) -> str:
        """The name of its device in plans and results."""
        return self.progress.spec.name(self.number)

    @property
    def title(self) -> str:
        """Its name in messages to the user."""
        return f"worker {self.number} ({self.progress.spec}, process {self.process.pid})"

    @property
    def is_tried(self) -> bool:
        """True if it has tried its speed."""
        return self.progress.samples_per_s is not None

    @property
    def trial(self) -> SpeedTrial:
        """The seconds that its batches took in its trials."""
        return SpeedTrial(self.number, self.progress.spec, self.tried)

    @property
    def as_past(self) -> PastWorker:
        """Describes it for a run that goes on without it."""
        own = self.progress
        return PastWorker(self.name, str(own.spec), own.samples_per_s)

    def await_report(self) -> None:
        """Count its silence from now on, if there is work that it will report."""
        self.awaited_since_s = time.monotonic() if self.progress.assigned else inf


class WorkerProcesses(PacketWorkers[WorkerProcess]):
    """The processes that train one model in shared memory.

    Numbers begin with `first_number`, behind those of the workers of an earlier run.
    """

    def __init__(self, training: Training, config: Hogbatch, deadline_s: float) -> None:
        super().__init__(_MODULE, deadline_s, MOST_NBYTES)
        self._training, self._config = training, config
        self._free_cores = physical_cores(os.sched_getaffinity(0))
        self.first_number = 0

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker, which asks for work when it is ready."""
        number = self.first_number + len(self.workers)
        if number >= MOST_WORKERS:
            raise InvalidInput("workers", f"a run can have {MOST_WORKERS}, also one after another")
        depth, training = self._config.depth_of(spec.kind), self._training
        state = self.memory_file("state")
        cores = self._cores(0 if spec.kind == DeviceKind.GPU else spec.threads)

        def settings(socket: int) -> str:
            return ProcessSettings(
                number=number,
                spec=spec,
                depth=depth,
                cores=cores,
                socket=socket,
                state=state,
                training=training,
            ).model_dump_json()

        fds = state, training.parameters.fd, training.data.fd
        process, wire = self.launch(settings, fds)
        progress = WorkerProgress(number, spec, depth)
        self.add(WorkerProcess(number, process, wire, progress=progress, state=state))

    def _cores(self, count: int) -> tuple[int, ...]:
        """Take free cores, of which none is left for others; none if there are too few."""
        count = count if count <= len(self._free_cores) else 0  # then the kernel chooses
        taken, self._free_cores = self._free_cores[:count], self._free_cores[count:]
        return tuple(cpu for core in taken for cpu in core)

    def stop(self) -> tuple[list[Span], list[int]]:
        """Stop all workers; return their traced spans, and the peak memory of each in bytes."""
        stopped = self.running
        for worker in stopped:  # all before the first is waited for: they end side by side
            worker.send(ExecuteWork(Command.STOP).pack())
        for worker in stopped:
            worker.process.wait(_STOP_S)
            self.end(worker)
        left = [left_by(worker.state) for worker in stopped]
        return [span for spans, _ in left for span in spans], [peak for _, peak in left]
