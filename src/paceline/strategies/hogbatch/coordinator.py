"""Assign an epoch's samples to idle workers, as in Ma, Rusu et al. 2020, section V.

    worker       ScheduleWork: a tuple of BatchResults ----> coordinator
    coordinator  ExecuteWork: samples and learning rate ----> the same worker

One loop polls the connections to the workers, and `BatchScheduler` chooses each batch. A worker
with short batches gets several batches in advance and reports several results at once. If a worker
process ends or does not answer in time, other workers get its unfinished samples. A batch is done
when its worker has reported it. Of a dead worker's unreported batches, those up to the number that
it last wrote to shared memory are done. For a checkpoint the coordinator pauses: it assigns no more
batches and waits for the assigned ones.
"""

import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.checkpoints.tensor_file import Tensors, within
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.exchange.session import Status, TrainingSession
from paceline.links.clock import TrainingClock
from paceline.links.cores import physical_cores
from paceline.links.failpoints import reach
from paceline.links.packet_workers import PacketWorker, PacketWorkers
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import MOST_WORKERS, WorkerSpec
from paceline.strategies.hogbatch.scheduler import WORKER_COUNTS, BatchScheduler, WorkerProgress
from paceline.strategies.hogbatch.statistics import BatchLog, BatchRecord

logger = logging.getLogger(__name__)

_NS = 1e-9
_LOG = "log/batches_s"


@dataclass(eq=False, kw_only=True)
class WorkerProcess(PacketWorker):
    """A process that runs the module `MODULE` as a worker, and the worker's progress."""

    MODULE = "paceline.strategies.hogbatch.worker"
    progress: WorkerProgress

    @property
    def title(self) -> str:
        """The name of this worker in messages to the user."""
        return f"worker {self.number} ({self.progress.spec}, process {self.process.pid})"


class KnownWorker(NamedTuple):
    """A worker of this run, or of an interrupted run that this run resumes.

    `name`: device name in results. `tried_samples_per_s`: measured speed; None without a trial.
    """

    name: str
    spec: str
    tried_samples_per_s: float | None


class Coordinator:
    """Trains epochs by assigning their samples to the workers of a run.

    `epoch_sizes`: the number of samples in each epoch. `between`: a callback that is called after
    each poll of the workers; it may call `pause`, or raise an exception to end training. `log`: the
    completed batches of all epochs. `lost`: a text per lost worker, with its name and the reason.
    `past`: in a resumed run, the workers that trained before the interruption.
    """

    def __init__(
        self,
        session: TrainingSession,
        training: messages.Training,
        processes: PacketWorkers[WorkerProcess],
        epoch_sizes: Sequence[int],
        tokens_per_sample: int | None,
    ) -> None:
        self._config, self._training = session.config, training
        self._clock, self._status = TrainingClock(), Status(session.progress, tokens_per_sample)
        # Saved states that workers will load, by worker number.
        self._resumed: dict[int, tuple[dict[str, Any], Tensors]] = {}
        self._is_paused = True
        own = session.config, training.settings.batch_size, epoch_sizes
        self.scheduler = BatchScheduler(*own, training.data.tensors[messages.COMMITTED])
        self.processes, self.log = processes, BatchLog()
        self.lost: list[str] = []
        self.past: list[KnownWorker] = []
        self.between: Callable[[], None] | None = None

    @property
    def trained_s(self) -> float:
        """Seconds of training so far, without tests between epochs."""
        return self._clock.trained_ns * _NS

    @property
    def known(self) -> list[KnownWorker]:
        """All workers of the run in ascending order of their numbers, including those in `past`."""
        found = list(self.past)
        for one in (worker.progress for worker in self.processes.workers):
            speed = one.trial.samples_per_s if one.trial else None
            found.append(KnownWorker(one.spec.name(one.number), str(one.spec), speed))
        return found

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start worker processes, each on its own cores; a process sends a message when ready.

        Workers of a resumed run do not reuse the numbers of the workers in `past`.
        """
        if len(self.past) + len(specs) > MOST_WORKERS:
            problem = f"must be at most {MOST_WORKERS}, including workers of the resumed run"
            raise InvalidInput("workers", problem)
        free, training = physical_cores(os.sched_getaffinity(0)), self._training
        for number, spec in enumerate(specs, len(self.past)):
            count, depth = spec.num_cores, self._config.depth_of(spec.kind)
            if count > len(free):
                count = 0  # too few free cores: leave the choice of cores to the kernel
            cores, free = tuple(cpu for core in free[:count] for cpu in core), free[count:]
            settings = messages.ProcessSettings(number, spec, depth, cores, training)
            fds = training.parameters.fd, training.data.fd
            process, wire = self.processes.launch(settings, fds)
            progress = WorkerProgress(number, spec, depth)
            self.processes.add(WorkerProcess(number, process, wire, progress=progress))

    def try_speeds(self) -> list[messages.SpeedTrial]:
        """Wait until all workers are ready, then let all measure their batch times at once.

        Raises WorkerLost if no worker starts, and InvalidInput if a worker rejects its settings.
        """
        # Measure all at once, because workers that share cores or memory slow each other down.
        self._poll(lambda: all(worker.is_ready for worker in self.processes.running))
        self._ask(self.processes.running, messages.Command.TRY)
        trials = (one.progress.trial for one in self.processes.running)
        return [one for one in trials if one is not None]

    def end_workers(self, numbers: Container[int]) -> None:
        """End the workers with these numbers, before any batch is assigned."""
        for worker in [one for one in self.processes.running if one.number in numbers]:
            self.processes.end(worker)
            worker.progress.trial = None

    def begin(self) -> None:
        """Create the policy for the running workers; send resumed workers their saved states."""
        self.scheduler.choose_policy([one.progress for one in self.processes.running])
        loading = [one for one in self.processes.running if one.number in self._resumed]
        for worker in loading:
            saved, tensors = self._resumed.pop(worker.number)
            for name in WORKER_COUNTS:
                setattr(worker.progress, name, saved["counts"][name])
            worker.wire.write((tensors, saved["state"]))
        self._ask(loading, messages.Command.LOAD)

    def train_epoch(self, epoch: int, order: Tensor) -> tuple[float, float]:
        """Train once on the samples in this order; return the mean loss and the seconds it took.

        Raises InvalidInput if a loss is not finite, and WorkerLost if no worker is left.
        """
        reach("epoch.begun", epoch=epoch)
        self._training.data.tensors[messages.ORDER][: len(order)].copy_(order)
        if epoch != self.scheduler.epoch:  # epoch 0 and a resumed run's epoch have already begun
            self.scheduler.begin_epoch(epoch)
            self._clock.begin_epoch()
        while not self.scheduler.is_epoch_done:
            if self._is_paused:
                self._is_paused = False
                self._clock.resume()
                self._status.begin()
                self._hand_out(self.processes.running)
            self._poll_once()
            if self.between is not None:
                self.between()
        self.pause()
        return self.scheduler.mean_loss, self._clock.epoch_ns * _NS

    def pause(self) -> None:
        """Assign no more batches, and wait until all assigned batches are done."""
        if not self._is_paused:
            self._is_paused = True
            self._poll(lambda: not any(one.progress.assigned for one in self.processes.running))
            self._clock.stop()

    def _poll(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._poll_once()

    def _poll_once(self) -> None:
        for worker, message, why in self.processes.poll():
            if isinstance(message, messages.SpeedTrial):
                worker.progress.trial = message
            elif isinstance(message, tuple):
                self._complete(worker, message)
            elif message is None:
                self._drop(worker, why)

    def _complete(self, worker: WorkerProcess, results: Sequence[messages.BatchResult]) -> None:
        done = []
        for result in results:
            if not isfinite(result.loss):
                rate = self._training.settings.learning_rate
                epoch = self.scheduler.epoch + 1
                problem = f"the loss of {worker.title} became {result.loss} in epoch {epoch}"
                hint = "reduce it" if rate is None else f"reduce it below {rate:g}"
                raise InvalidInput("learning_rate", problem, hint=hint)
            done.append((self.scheduler.complete(worker.progress, result), result))
        worker.awaited_since_s = time.monotonic() if worker.progress.assigned else inf
        self._hand_out([worker])  # assign before logging: the worker is waiting
        for work, result in done:
            self._log(worker, work, result)

    def _log(
        self, worker: WorkerProcess, work: messages.ExecuteWork, result: messages.BatchResult
    ) -> None:
        loss, *moments_ns = result
        num_updates = worker.progress.spec.num_updates(work.size)
        own = worker.number, self.scheduler.epoch, work.first, work.size, num_updates, loss
        times_s = [self._clock.at(moment_ns) * _NS for moment_ns in moments_ns]
        self.log.append(BatchRecord(*own, *times_s))
        self._status.add(work.size, self.scheduler.mean_loss, advances=work.size)

    def _hand_out(self, workers: Iterable[WorkerProcess]) -> None:
        """Send workers their next batches, unless the coordinator is paused."""
        for worker in workers:
            while not self._is_paused and (work := self.scheduler.next_work(worker.progress)):
                worker.send(work)

    def _drop(self, worker: WorkerProcess, why: str) -> None:
        """Continue without a lost worker, and assign its unfinished samples to other workers."""
        self.lost.append(reason := f"{worker.title} {why}")
        for work, result in self.scheduler.drop(worker.progress, time.monotonic_ns()):
            self._log(worker, work, result)
        if not self.processes.running:
            raise WorkerLost(f"{reason}; no worker is left")
        logger.warning("%s: continuing without it", reason)
        # Hand out batches only to idle workers: a message would extend a busy worker's deadline.
        self._hand_out([one for one in self.processes.running if not one.progress.assigned])

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Pause the workers, and return the state for a checkpoint, without the model."""
        self.pause()
        # Copy the log, because a bytearray cannot grow while a tensor uses its memory.
        log, workers = bytearray(self.log.packed), list[dict[str, Any]]()
        tensors = {_LOG: torch.frombuffer(log, dtype=torch.uint8) if log else torch.empty(0).byte()}
        for worker in self._ask(self.processes.running, messages.Command.SAVE):
            own, values = worker.wire.read()
            tensors |= {f"workers/{len(workers)}/{key}": one for key, one in own.items()}
            counts = {name: getattr(worker.progress, name) for name in WORKER_COUNTS}
            workers.append({"number": worker.number, "counts": counts, "state": values})
        values = {
            **self.scheduler.state(),
            "clock": self._clock.state(),
            "lost": list(self.lost),
            "known": [list(one) for one in self.known],
            "workers": workers,
        }
        return tensors, values

    def restore(
        self, specs: Sequence[WorkerSpec], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> None:
        """Restore what `state` returned; call before the workers of `specs` are started.

        If `specs` differ from the checkpoint's workers, all optimizers and random number generators
        start fresh.
        """
        if _LOG not in tensors or "known" not in values:
            problem = "the checkpoint is from an earlier version of Paceline"
            raise InvalidInput("resume", problem, hint="start a new run")
        self.scheduler.restore(values)
        self._clock.restore(values["clock"])
        past, workers = [KnownWorker(*one) for one in values["known"]], values["workers"]
        saved = [(one["number"], past[one["number"]].spec) for one in workers]
        if saved == list(enumerate(map(str, specs), len(past) - len(workers))):
            del past[len(past) - len(workers) :]
            for index, one in enumerate(workers):
                self._resumed[one["number"]] = one, within(tensors, f"workers/{index}/")
        else:
            logger.warning(
                "resume: workers changed from %s to %s; their optimizers (momentum) and random "
                "numbers begin anew",
                ", ".join(spec for _, spec in saved),
                ", ".join(map(str, specs)),
            )
        log = BatchLog(tensors[_LOG].numpy().tobytes())
        self.log, self.lost, self.past = log, list(values["lost"]), past

    def _ask(
        self, workers: Sequence[WorkerProcess], command: messages.Command
    ) -> list[WorkerProcess]:
        """Send a command to idle workers; return the workers that answered."""
        for worker in workers:
            worker.send(command)
        self._poll(lambda: all(one.is_ended or one.awaited_since_s == inf for one in workers))
        return [worker for worker in workers if not worker.is_ended]
