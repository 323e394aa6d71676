"""The coordinator of section V: a worker that asks for work gets the next samples of the epoch.

    worker       ScheduleWork: what it has done ----> coordinator
    coordinator  ExecuteWork: which samples, at what learning rate ----> the same worker

One loop polls the workers' sockets. A worker with short batches is assigned several in advance, and
reports several at once. If a worker ends, or does not answer in time, its samples go to the others.
A worker may join at any time. A batch counts when its worker reports it, or has written its number
to shared memory before it died.
"""

import logging
import time
from collections.abc import Callable, Sequence
from math import isfinite, nan

from torch import Tensor

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.strategies.hogbatch import messages, policy
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, Failure, ScheduleWork
from paceline.strategies.hogbatch.processes import WorkerProcess, WorkerProcesses
from paceline.strategies.hogbatch.statistics import BatchLog, BatchRecord, BatchResult

logger = logging.getLogger(__name__)

_NS = 1e-9
_NUM_TRIALS = 2  # of each worker
_MOST_TRACED = 50  # batches of each worker


class Coordinator:
    """Hands out the samples of epochs to the workers of a run.

    `processes`: the workers; one may be started at any time. `data`: the tensors that all share
    beside the model. `log`: the batches of all epochs. `lost`: the workers that ended before the
    run, and why. `policy`: that of the workers that take part now; None before their trials.
    """

    def __init__(
        self, session: TrainingSession, processes: WorkerProcesses, data: dict[str, Tensor]
    ) -> None:
        assert isinstance(session.settings, TrainSettings)
        self._settings, self._progress = session.settings, session.progress
        self._config: Hogbatch = session.config
        self._order, self._committed = data[messages.ORDER], data[messages.COMMITTED]
        self._active: list[WorkerProcess] = []  # those that the policy knows, in its order
        self._queue = policy.SampleQueue(0)
        self._epoch = 0
        self._num_batches = self._num_updates = 0
        self._loss_sum, self._num_reported = 0.0, 0  # of this epoch; samples whose loss is known
        self._offset_ns = self._trained_ns = 0  # of the clock of training
        self._has_begun = False
        self.processes = processes
        self.policy: policy.Policy | None = None
        self.log = BatchLog()
        self.lost: list[str] = []

    @property
    def trained_s(self) -> float:
        """Seconds of training so far, without what lies between epochs."""
        return self._trained_ns * _NS

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start the first workers, and have all try their speed at once, as they will work.

        Raises WorkerLost if none starts, and InvalidInput if a worker finds its settings wrong.
        """
        for spec in specs:
            self.processes.start(spec)
        # Trials begin together: workers that share cores or memory slow each other down in them.
        self._poll(lambda: all(worker.is_ready for worker in self.processes.running))
        for worker in self.processes.running:
            self._try(worker)
        self._has_begun = True
        self._poll(lambda: all(one.samples_per_s is not None for one in self.processes.running))

    def train_epoch(self, epoch: int, order: Tensor) -> tuple[float, float]:
        """Train on all samples once, in this order; return the mean loss and the seconds it took.

        Raises InvalidInput for a loss that is not finite, WorkerLost if no worker is left.
        """
        self._order.copy_(order)
        self._epoch, self._queue = epoch, policy.SampleQueue(len(order))
        self._loss_sum, self._num_reported = 0.0, 0
        self._offset_ns = time.monotonic_ns() - self._trained_ns
        self._hand_out_to_idle()
        self._poll(lambda: self._queue.is_done)
        before_ns, self._trained_ns = self._trained_ns, time.monotonic_ns() - self._offset_ns
        mean_loss = self._loss_sum / max(1, self._num_reported)
        return mean_loss, (self._trained_ns - before_ns) * _NS

    def _poll(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            for worker, packet, why in self.processes.poll():
                if packet:
                    self._receive(worker, packet)
                else:
                    self._drop(worker, why)

    def _receive(self, worker: WorkerProcess, packet: bytes) -> None:
        received = messages.unpack(packet)
        if isinstance(received, Failure):
            reason = f"{worker.title} failed: {received.reason}"
            raise InvalidInput(reason) if received.by_input else WorkerLost(reason)
        if received[0].batch == messages.READY:
            worker.is_ready = True
            if self._has_begun:
                self._try(worker)
        elif received[0].batch != messages.TRIED:
            self._complete(worker, received)
        else:
            worker.tried[worker.untried.pop(0)] = received[0].result.ended_ns * _NS
            if worker.untried:
                self._try(worker)
                return
            worker.samples_per_s = worker.trial.samples_per_s
            # One that joins late does not have to catch up with what was done before it came.
            worker.updates = min((other.updates for other in self._active), default=0.0)
            self._choose_policy()
            self._hand_out(worker)

    def _try(self, worker: WorkerProcess) -> None:
        """Try the smallest batch and one of the batch size; the last one tells the speed."""
        if not worker.tried:
            most = min(self._settings.batch_size, len(self._order))
            worker.untried = list(dict.fromkeys((min(worker.spec.threads, most), most)))
        seconds = self._settings.profile_s / _NUM_TRIALS
        worker.send(ExecuteWork(Command.TRY, size=worker.untried[0], rate=seconds))

    def _choose_policy(self) -> None:
        self._active = [one for one in self.processes.running if one.samples_per_s is not None]
        if self._active:
            specs = [worker.spec for worker in self._active]
            speeds = [worker.samples_per_s or 1.0 for worker in self._active]
            self.policy = policy.policy_of(self._config, specs, speeds, self._settings.batch_size)

    def _complete(self, worker: WorkerProcess, reports: Sequence[ScheduleWork]) -> None:
        done = []
        for batch, size, result in reports:
            work = worker.assigned[0] if worker.assigned else None
            if work is None or work.batch != batch:
                raise WorkerLost(f"{worker.title} speaks of a batch that it was not given")
            if not isfinite(result.loss):
                known = self._settings.learning_rate
                rate = "" if known is None else f" than {known:g}"
                raise InvalidInput(
                    f"learning_rate: the loss of {worker.title} became {result.loss} in epoch "
                    f"{self._epoch + 1}, on a batch of {size}; choose a smaller one{rate}"
                )
            # Batches of a GPU overlap: one takes as long as it ends after the one before.
            took_ns = result.ended_ns - max(result.started_ns, worker.ended_ns)
            worker.latest, worker.ended_ns = (work.size, took_ns * _NS), result.ended_ns
            self._count(worker, work, result.updates)
            self._loss_sum += result.loss
            self._num_reported += work.size
            done.append((work, result))
        self._hand_out(worker)  # before the log is written, for the worker waits
        for work, result in done:
            self._log(worker, work, result)

    def _count(self, worker: WorkerProcess, work: ExecuteWork, updates: int) -> None:
        worker.complete(self._num_updates - worker.num_updates)
        worker.updates += policy.updates_of(worker.spec, work.size, self._config.beta)
        worker.num_updates += updates
        self._num_updates += updates
        self._queue.complete(work.places)

    def _log(self, worker: WorkerProcess, work: ExecuteWork, result: BatchResult) -> None:
        times_ns = (moment - self._offset_ns for moment in result[2:])
        trained = BatchResult(result.updates, result.loss, *times_ns)
        self.log.append(BatchRecord(worker.number, self._epoch, work.first, work.size, trained))
        self._progress.advance(work.size)

    def _hand_out(self, worker: WorkerProcess) -> None:
        """Assign the next samples to a worker, if there are any.

        Short batches come in advance, and a GPU has one being copied in beside those it works on.
        """
        speeds = sum(one.samples_per_s or 0.0 for one in self._active)
        # Learning rates may fall with what its latest batch has missed: then none is given early.
        prefetches = self._config.staleness_decay == 0
        while self._queue:
            left_s = len(self._queue) / speeds
            assigned_s = [worker.expected_s(one.size) for one in worker.assigned]
            if not policy.wants_more(assigned_s, left_s, worker.depth, prefetches=prefetches):
                return
            self._assign(worker)

    def _assign(self, worker: WorkerProcess) -> None:
        assert self.policy is not None
        updates = []
        for one in self._active:
            # As if its assigned batches were done; of others the last may well not be by then.
            expected = list(one.assigned) if one is worker else list(one.assigned)[:-1]
            made = (policy.updates_of(one.spec, work.size, self._config.beta) for work in expected)
            updates.append(one.updates + sum(made))
        sizes = [one.size for one in self._active]
        worker.size = self.policy.next_batch(self._active.index(worker), updates, sizes)
        taken = self._queue.take(worker.size)
        decay = self._config.staleness_decay
        rate = policy.rate_factor(len(taken), self._settings.batch_size, worker.staleness, decay)
        is_traced_epoch = self._epoch == min(1, self._settings.epochs - 1)
        traced = is_traced_epoch and worker.num_traced < _MOST_TRACED
        worker.num_traced += traced
        number = self._num_batches
        self._num_batches += 1
        work = ExecuteWork(Command.TRAIN, number, taken.start, len(taken), rate, traced)
        worker.assign(work, self._num_updates - worker.num_updates)

    def _hand_out_to_idle(self) -> None:
        for worker in self._active:
            if not worker.assigned:
                self._hand_out(worker)

    def _drop(self, worker: WorkerProcess, why: str) -> None:
        """Go on without a worker: its batches were done, or go to the others."""
        reason = f"{worker.title} {why}"
        self.lost.append(reason)
        self._choose_policy()  # before samples go to the others
        for work in tuple(worker.assigned):
            if int(self._committed[worker.number]) < work.batch:
                worker.assigned.popleft()
                self._queue.give_back(work.places)
                continue
            # Its update is in the model, although it was not reported.
            updates = min(worker.spec.threads, work.size)
            self._count(worker, work, updates)
            self._log(worker, work, BatchResult(updates, nan, *[time.monotonic_ns()] * 7))
        if not self.processes.running:
            raise WorkerLost(f"{reason}: no worker is left")
        logger.warning("%s: the others go on", reason)
        self._hand_out_to_idle()
