"""The worker processes of a run, each on cores of its own."""

import os
import time
from dataclasses import dataclass
from math import inf

from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind
from paceline.links.cores import physical_cores
from paceline.links.packet_workers import PacketWorker, PacketWorkers
from paceline.strategies.hogbatch.config import MOST_WORKERS, Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import ProcessSettings, Training
from paceline.strategies.hogbatch.scheduler import WorkerProgress


@dataclass(eq=False, kw_only=True)
class WorkerProcess(PacketWorker):
    """A worker process, as the coordinator knows it; `is_asked`: to write or read its state."""

    progress: WorkerProgress
    is_asked: bool = False

    @property
    def title(self) -> str:
        """Its name in messages to the user."""
        return f"worker {self.number} ({self.progress.spec}, process {self.process.pid})"

    def await_report(self) -> None:
        """Count its silence from now on, if there is work that it will report."""
        self.awaited_since_s = time.monotonic() if self.progress.assigned else inf


class WorkerProcesses(PacketWorkers[WorkerProcess]):
    """The processes that train one model in shared memory.

    Numbers begin with `first_number`, behind those of the workers of an earlier run.
    """

    def __init__(self, training: Training, config: Hogbatch, deadline_s: float) -> None:
        super().__init__("paceline.strategies.hogbatch.worker", deadline_s)
        self._training, self._config = training, config
        self._free_cores = physical_cores(os.sched_getaffinity(0))
        self.first_number = 0

    def start(self, spec: WorkerSpec) -> None:
        """Start a worker, which asks for work when it is ready."""
        number = self.first_number + len(self.workers)
        if number >= MOST_WORKERS:
            raise InvalidInput("workers", f"a run can have {MOST_WORKERS}, also one after another")
        depth, training = self._config.depth_of(spec.kind), self._training
        cores = self._cores(0 if spec.kind == DeviceKind.GPU else spec.threads)
        process, wire = self.launch(
            ProcessSettings(number, spec, depth, cores, training),
            (training.parameters.fd, training.data.fd),
        )
        progress = WorkerProgress(number, spec, depth)
        self.add(WorkerProcess(number, process, wire, progress=progress))

    def _cores(self, count: int) -> tuple[int, ...]:
        """Take free cores, of which none is left for others; none if there are too few."""
        count = count if count <= len(self._free_cores) else 0  # then the kernel chooses
        taken, self._free_cores = self._free_cores[:count], self._free_cores[count:]
        return tuple(cpu for core in taken for cpu in core)
