"""The coordinator of section V: a worker that asks for work gets the next samples of the epoch.

    worker       ScheduleWork: what it has done ----> coordinator
    coordinator  ExecuteWork: which samples, at what learning rate ----> the same worker

One loop polls the workers' sockets, and `BatchScheduler` decides. A worker with short batches is
assigned several in advance, and reports several at once. If a worker ends, or does not answer in
time, its samples go to the others. A batch counts when its worker reports it, or has written its
number to shared memory before it died. For a checkpoint the workers pause: they finish what they
were given, and get nothing more.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.memory_file import read_state, write_state
from paceline.checkpoints.tensor_file import Tensors, within
from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.links.clock import TrainingClock
from paceline.links.failpoints import reach
from paceline.strategies.hogbatch import messages
from paceline.strategies.hogbatch.config import WorkerSpec
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, Failure, ScheduleWork
from paceline.strategies.hogbatch.processes import WorkerProcess, WorkerProcesses
from paceline.strategies.hogbatch.progress import History, PastWorker, Status
from paceline.strategies.hogbatch.scheduler import BatchScheduler, WorkerCounts
from paceline.strategies.hogbatch.statistics import BatchLog, BatchRecord, BatchResult

logger = logging.getLogger(__name__)

_NS = 1e-9
_NUM_TRIALS = 2  # of each worker
_LOG = "log/batches"


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
        self._clock, self._status = TrainingClock(), Status(session, tokens_per_sample)
        self._resumed: list[tuple[dict[str, Any], Tensors]] = []  # what workers get at first
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

    def try_speeds(self) -> None:
        """Wait for the first workers, and have all try their speed at once, as they will work.

        Raises WorkerLost if none starts, and InvalidInput if a worker finds its settings wrong.
        """
        # Trials begin together: workers that share cores or memory slow each other down in them.
        self._poll(lambda: all(worker.is_ready for worker in self.processes.running))
        for worker in self.processes.running:
            self._try(worker)
        self._poll(lambda: all(one.is_tried for one in self.processes.running))
        self.scheduler.choose_policy([one.progress for one in self.processes.running])

    def train_epoch(self, epoch: int, order: Tensor) -> tuple[float, float]:
        """Train on the samples once, in this order; return the mean loss and the seconds it took.

        Raises InvalidInput for a loss that is not finite, WorkerLost if no worker is left.
        """
        reach("epoch.begun", epoch=epoch)
        self._order[: len(order)].copy_(order)
        if self.scheduler.begin_epoch(epoch):
            self._clock.begin_epoch()
        self._load_workers()
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
        self._clock.go_on()
        self._status.begin()
        self._hand_out_to_idle()

    def _poll(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._poll_once()

    def _poll_once(self) -> None:
        for worker, packet, why in self.processes.poll():
            if packet:
                self._receive(worker, packet)
            else:
                self._drop(worker, why)

    def _receive(self, worker: WorkerProcess, packet: bytes) -> None:
        received = messages.unpack(packet)
        if isinstance(received, Failure):
            reason = f"{worker.title} failed: {received.reason}"
            raise InvalidInput.of(reason) if received.by_input else WorkerLost(reason)
        first = received[0]
        if first.batch == messages.READY:
            worker.is_ready = True
        elif first.batch in (messages.SAVED, messages.LOADED):
            worker.is_asked = False
        elif first.batch != messages.TRIED:
            self._complete(worker, received)
        else:
            worker.tried[first.size] = first.result.ended_ns * _NS
            self._try(worker)

    def _try(self, worker: WorkerProcess) -> None:
        """Have a worker try the smallest batch and then one of the batch size."""
        most = min(self._settings.batch_size, len(self._order))
        for size in (min(worker.progress.spec.threads, most), most):
            if size not in worker.tried:
                seconds = self._settings.profile_s / _NUM_TRIALS
                worker.send(ExecuteWork(Command.TRY, size=size, rate=seconds).pack())
                return
        worker.progress.samples_per_s = worker.trial.samples_per_s

    def _complete(self, worker: WorkerProcess, reports: Sequence[ScheduleWork]) -> None:
        done, progress = [], worker.progress
        for batch, size, result in reports:
            if not progress.assigned or progress.assigned[0].batch != batch:
                raise WorkerLost(f"{worker.title} speaks of a batch that it was not given")
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
        epoch, number = self.scheduler.counts.epoch, worker.progress.number
        self.history.log.append(BatchRecord(number, epoch, work.first, work.size, trained))
        self._status.add(work.size, result.loss)

    def _hand_out(self, worker: WorkerProcess) -> None:
        """Send a worker what it gets now, unless it is a pause."""
        while not self._is_paused:
            work = self.scheduler.next_work(worker.progress)
            if work is None:
                return
            worker.send(work.pack())

    def _hand_out_to_idle(self) -> None:
        for worker in self.processes.running:
            if not worker.progress.assigned:
                self._hand_out(worker)

    def _drop(self, worker: WorkerProcess, why: str) -> None:
        """Go on without a worker: its batches were done, or go to the others."""
        reason = f"{worker.title} {why}"
        self.history.lost.append(reason)
        for work, updates in self.scheduler.drop(worker.progress):
            self._log(worker, work, BatchResult(updates, nan, *[time.monotonic_ns()] * 7))
        if not self.processes.running:
            raise WorkerLost(f"{reason}: no worker is left")
        logger.warning("%s: the others go on", reason)
        self._hand_out_to_idle()

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return what a checkpoint has beside the model: in a pause, or between epochs."""
        if not self._is_paused:
            raise RuntimeError("the state of a run is asked for in a pause, or between its epochs")
        asked = self.processes.running
        self._ask(asked, Command.SAVE)
        log, workers = self.history.log.packed, list[dict[str, Any]]()
        tensors = {_LOG: torch.frombuffer(log, dtype=torch.uint8) if log else torch.empty(0).byte()}
        for worker in (one for one in asked if not one.is_ended):
            own, values = read_state(worker.state)
            tensors |= {f"workers/{len(workers)}/{key}": one for key, one in own.items()}
            spec, counts = str(worker.progress.spec), asdict(worker.progress.counts)
            workers.append({"spec": spec, "counts": counts, "state": values})
        values = {
            **self.scheduler.state(),
            "clock": self._clock.state(),
            "lost": list(self.history.lost),
            "past": [list(one) for one in self.history.past],
            "started": [list(one.as_past) for one in self.processes.workers],
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
        past = [PastWorker(*one) for one in values["past"]]
        saved = [one["spec"] for one in values["workers"]]
        if saved == list(map(str, specs)) and len(saved) == len(values["started"]):
            for index, one in enumerate(values["workers"]):
                self._resumed.append((one, within(tensors, f"workers/{index}/")))
        else:
            past += [PastWorker(*one) for one in values["started"]]
            logger.warning(
                "resume: workers %s go on with what %s have trained; their optimizers (momentum) "
                "and random numbers begin anew",
                ", ".join(map(str, specs)),
                ", ".join(saved),
            )
        log = BatchLog(tensors[_LOG].numpy().tobytes())
        self.history = History(log, list(values["lost"]), past)
        self.processes.first_number = len(past)

    def _load_workers(self) -> None:
        """Give the workers what they had when the run was saved, if they are the same."""
        by_number = {worker.progress.number: worker for worker in self.processes.running}
        first, resumed, self._resumed = self.processes.first_number, self._resumed, []
        loading = []
        for number, (saved, tensors) in enumerate(resumed, first):
            if (worker := by_number.get(number)) is not None:
                worker.progress.counts = WorkerCounts(**saved["counts"])
                write_state(worker.state, tensors, saved["state"])
                loading.append(worker)
        self._ask(loading, Command.LOAD)

    def _ask(self, workers: Sequence[WorkerProcess], command: Command) -> None:
        """Have idle workers save or load their state, and wait for it."""
        for worker in workers:
            worker.is_asked = True
            worker.send(ExecuteWork(command).pack())
        self._poll(lambda: not any(one.is_asked for one in workers if not one.is_ended))
