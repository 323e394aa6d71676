"""The coordinator of section V: a worker that asks for work gets the next samples of the epoch.

    worker       ScheduleWork: what it has done ----> coordinator
    coordinator  ExecuteWork: which samples, at what learning rate ----> the same worker

One loop polls the workers' wires, and `BatchScheduler` decides. A worker with short batches is
assigned several in advance, and reports several at once. If a worker ends, or does not answer in
time, its samples go to the others. A batch counts when its worker reports it, or has written its
number to shared memory before it died. For a checkpoint the workers pause: they finish what they
were given, and get nothing more.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.checkpoints.tensor_file import Tensors, within
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.settings import TrainSettings
from paceline.exchange.session import Status, TrainingSession
from paceline.links.clock import TrainingClock
from paceline.links.failpoints import reach
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, ScheduleWork, TrySpeed
from paceline.strategies.hogbatch.policy import SpeedTrial
from paceline.strategies.hogbatch.processes import WorkerProcess, WorkerProcesses
from paceline.strategies.hogbatch.scheduler import BatchScheduler, WorkerCounts
from paceline.strategies.hogbatch.statistics import BatchLog, BatchRecord, BatchResult

logger = logging.getLogger(__name__)

_NS = 1e-9
_LOG = "log/batches"


class KnownWorker(NamedTuple):
    """A worker of the run, also before it was resumed; its device's name in plans and results."""

    name: str
    spec: str
    tried_samples_per_s: float | None


@dataclass(slots=True)
class History:
    """The batches of all epochs, and the workers before the run was resumed with others.

    `lost` says why each worker has ended before the run.
    """

    log: BatchLog = field(default_factory=BatchLog)
    lost: list[str] = field(default_factory=list)
    past: list[KnownWorker] = field(default_factory=list)


class Coordinator:
    """Hands out the samples of epochs to the workers of a run.

    `data`: the tensors that all workers share beside the model. `epoch_sizes`: the samples of each
    epoch of the run. `between` is called very often between batches, and may `pause`; if it raises,
    training is over.
    """

    def __init__(
        self,
        session: TrainingSession,
        processes: WorkerProcesses,
        data: dict[str, Tensor],
        epoch_sizes: Sequence[int],
        tokens_per_sample: int | None = None,
    ) -> None:
        assert isinstance(session.settings, TrainSettings)
        self._settings, self._order = session.settings, data[messages.ORDER]
        self._clock, self._status = TrainingClock(), Status(session.progress, tokens_per_sample)
        self._resumed: dict[int, tuple[dict[str, Any], Tensors]] = {}  # what workers get at first
        self._is_paused = True
        self.scheduler = BatchScheduler(
            session.config, session.settings.batch_size, epoch_sizes, data[messages.COMMITTED]
        )
        self.processes, self.history = processes, History()
        self.between: Callable[[], None] | None = None

    @property
    def trained_s(self) -> float:
        """Seconds of training so far, without what lies between epochs."""
        return self._clock.trained_ns * _NS

    @property
    def known(self) -> list[KnownWorker]:
        """All workers of the run, by their numbers."""
        started = (worker.progress for worker in self.processes.workers)
        return self.history.past + [
            KnownWorker(one.spec.name(one.number), str(one.spec), one.samples_per_s)
            for one in started
        ]

    def try_speeds(self) -> None:
        """Wait for the first workers, and have all try their speed at once, as they will work.

        Raises WorkerLost if none starts, and InvalidInput if a worker finds its settings wrong.
        """
        # Trials begin together: workers that share cores or memory slow each other down in them.
        self._poll(lambda: all(worker.is_ready for worker in self.processes.running))
        most = min(self._settings.batch_size, len(self._order))
        for worker in self.processes.running:
            sizes = dict.fromkeys((min(worker.progress.spec.threads, most), most))
            worker.send(TrySpeed(tuple(sizes), self._settings.profile_s / 2))
        self._poll(lambda: all(one.progress.trial for one in self.processes.running))
        self.scheduler.choose_policy([one.progress for one in self.processes.running])
        self._load_workers()

    def train_epoch(self, epoch: int, order: Tensor) -> tuple[float, float]:
        """Train on the samples once, in this order; return the mean loss and the seconds it took.

        Raises InvalidInput for a loss that is not finite, WorkerLost if no worker is left.
        """
        reach("epoch.begun", epoch=epoch)
        self._order[: len(order)].copy_(order)
        if self.scheduler.begin_epoch(epoch):
            self._clock.begin_epoch()
        self._go_on()
        while not self.scheduler.queue.is_done:
            self._poll_once()
            if self.between is not None:
                self.between()
            if self._is_paused:
                self._go_on()
        self.pause()
        return self.scheduler.mean_loss, self._clock.epoch_ns * _NS

    def pause(self) -> None:
        """Hand out nothing more, and wait until the workers have done what they were given."""
        self._is_paused = True
        self._poll(lambda: not any(one.progress.assigned for one in self.processes.running))
        self._clock.stop()

    def _go_on(self) -> None:
        self._is_paused = False
        self._clock.resume()
        self._status.begin()
        self._hand_out_to_idle()

    def _poll(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._poll_once()

    def _poll_once(self) -> None:
        for worker, message, why in self.processes.poll():
            if isinstance(message, SpeedTrial):
                worker.progress.trial = message
            elif isinstance(message, Command):
                worker.is_asked = False
            elif message is None:
                self._drop(worker, why)
            elif message:
                self._complete(worker, message)

    def _complete(self, worker: WorkerProcess, reports: Sequence[ScheduleWork]) -> None:
        done, progress = [], worker.progress
        for _, size, result in reports:
            self._check_loss(worker, result.loss, size)
            # Batches of a GPU overlap: one takes as long as it ends after the one before.
            took_ns = result.ended_ns - max(result.started_ns, progress.ended_ns)
            work = self.scheduler.complete(progress, result.updates, result.loss)
            progress.latest, progress.ended_ns = (work.size, took_ns * _NS), result.ended_ns
            done.append((work, result))
        worker.await_report()
        self._hand_out(worker)  # before the log is written, for the worker waits
        for work, result in done:
            self._log(worker, work, result)

    def _check_loss(self, worker: WorkerProcess, loss: float, size: int) -> None:
        if not isfinite(loss):
            known = self._settings.learning_rate
            rate = "" if known is None else f" than {known:g}"
            raise InvalidInput(
                "learning_rate",
                f"the loss of {worker.title} became {loss} in epoch "
                f"{self.scheduler.counts.epoch + 1}, on a batch of {size}",
                hint=f"choose a smaller one{rate}",
            )

    def _log(self, worker: WorkerProcess, work: ExecuteWork, result: BatchResult) -> None:
        times_ns = (self._clock.at(moment) for moment in result[2:])
        trained = BatchResult(result.updates, result.loss, *times_ns)
        epoch = self.scheduler.counts.epoch
        self.history.log.append(BatchRecord(worker.number, epoch, work.first, work.size, trained))
        self._status.add(work.size, self.scheduler.mean_loss, advances=work.size)

    def _hand_out(self, worker: WorkerProcess) -> None:
        """Send a worker what it gets now, unless it is a pause."""
        while not self._is_paused:
            work = self.scheduler.next_work(worker.progress)
            if work is None:
                return
            worker.send(work)

    def _hand_out_to_idle(self) -> None:
        for worker in self.processes.running:
            if not worker.progress.assigned:
                self._hand_out(worker)

    def _drop(self, worker: WorkerProcess, why: str) -> None:
        """Go on without a worker: its batches were done, or go to the others."""
        reason = f"{worker.title} {why}"
        self.history.lost.append(reason)
        for work, updates in self.scheduler.drop(worker.progress):
            self._log(worker, work, BatchResult(updates, nan, *[time.monotonic_ns()] * 4))
        if not self.processes.running:
            raise WorkerLost(f"{reason}: no worker is left")
        logger.warning("%s: the others go on", reason)
        self._hand_out_to_idle()

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return what a checkpoint has beside the model: in a pause, or between epochs."""
        if not self._is_paused:
            raise RuntimeError("the state of a run is asked for in a pause, or between its epochs")
        log, workers = self.history.log.packed, list[dict[str, Any]]()
        tensors = {_LOG: torch.frombuffer(log, dtype=torch.uint8) if log else torch.empty(0).byte()}
        for worker in self._ask(self.processes.running, Command.SAVE):
            own, values = worker.wire.read()
            tensors |= {f"workers/{len(workers)}/{key}": one for key, one in own.items()}
            counts = asdict(worker.progress.counts)
            workers.append({"number": worker.number, "counts": counts, "state": values})
        values = {
            **self.scheduler.state(),
            "clock": self._clock.state(),
            "lost": list(self.history.lost),
            "known": [list(one) for one in self.known],
            "workers": workers,
        }
        return tensors, values

    def restore(
        self, specs: Sequence[WorkerSpec], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> None:
        """Go on from such a state with these workers, which are not started yet.

        If they are not the same, their optimizers and their random numbers begin anew.
        """
        assert not self.processes.workers
        self.scheduler.restore(values)
        self._clock.restore(values["clock"])
        past, workers = [KnownWorker(*one) for one in values["known"]], values["workers"]
        first = len(past) - len(workers)
        if [one["number"] for one in workers] == [*range(first, len(past))] and [
            one.spec for one in past[first:]
        ] == [str(spec) for spec in specs]:
            del past[first:]
            for index, one in enumerate(workers):
                self._resumed[one["number"]] = one, within(tensors, f"workers/{index}/")
        else:
            logger.warning(
                "resume: workers %s go on with what %s have trained; their optimizers (momentum) "
                "and random numbers begin anew",
                ", ".join(map(str, specs)),
                ", ".join(past[one["number"]].spec for one in workers),
            )
        log = BatchLog(tensors[_LOG].numpy().tobytes())
        self.history = History(log, list(values["lost"]), past)
        self.processes.first_number = len(past)

    def _load_workers(self) -> None:
        """Give the workers what they had when the run was saved, if they are the same."""
        loading = [one for one in self.processes.running if one.number in self._resumed]
        for worker in loading:
            saved, tensors = self._resumed.pop(worker.number)
            worker.progress.counts = WorkerCounts(**saved["counts"])
            worker.wire.write((tensors, saved["state"]))
        self._ask(loading, Command.LOAD)

    def _ask(self, workers: Sequence[WorkerProcess], command: Command) -> list[WorkerProcess]:
        """Have idle workers save or load their state; return those that have done so."""
        for worker in workers:
            worker.is_asked = True
            worker.send(command)
        self._poll(lambda: not any(one.is_asked for one in workers if not one.is_ended))
        return [worker for worker in workers if not worker.is_ended]
