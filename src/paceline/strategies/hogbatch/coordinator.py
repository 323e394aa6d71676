"""The coordinator of section V: a worker that asks for work gets the next samples of the epoch.

    worker       ScheduleWork: what it has done ----> coordinator
    coordinator  ExecuteWork: which samples, at what learning rate ----> the same worker

One loop polls the workers' sockets. A worker with short batches is assigned several in advance, and
reports several at once. If a worker ends, or does not answer in time, its samples go to the others.
A worker may join at any time. A batch counts when its worker reports it, or has written its number
to shared memory before it died. For a checkpoint the workers pause: they finish what they were
given, and get nothing more.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.core.settings import TrainSettings
from paceline.exchange.session import TrainingSession
from paceline.exchange.setup import learning_by, optimizer_by
from paceline.links.failpoints import reach
from paceline.recipes.recipe import Recipe
from paceline.strategies.hogbatch import messages, policy
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import Command, ExecuteWork, Failure, ScheduleWork
from paceline.strategies.hogbatch.processes import WorkerProcess, WorkerProcesses
from paceline.strategies.hogbatch.progress import Counts, PastWorker, Pauses, Status
from paceline.strategies.hogbatch.rates import ScheduledRate
from paceline.strategies.hogbatch.statistics import BatchLog, BatchRecord, BatchResult
from paceline.strategies.hogbatch.worker_state import Tensors, read_state, within, write_state

logger = logging.getLogger(__name__)

_NS = 1e-9
_NUM_TRIALS = 2  # of each worker
_MOST_TRACED = 50  # batches of each worker
_LOG = "log/batches"


class Coordinator:
    """Hands out the samples of epochs to the workers of a run.

    `processes`: the workers; one may be started at any time. `data`: the tensors that all share
    beside the model. `epoch_sizes`: the samples of each epoch of the run. `log`: the batches of all
    epochs. `lost`: the workers that ended before the run, and why; `past`: those of the run before
    it was resumed. `policy`: that of the workers that take part now; None before their trials.
    """

    def __init__(
        self,
        session: TrainingSession,
        processes: WorkerProcesses,
        data: dict[str, Tensor],
        recipe: Recipe,
        epoch_sizes: Sequence[int],
    ) -> None:
        assert isinstance(session.settings, TrainSettings)
        self._settings, self._progress = session.settings, session.progress
        self._config: Hogbatch = session.config
        self._order, self._committed = data[messages.ORDER], data[messages.COMMITTED]
        self._active: list[WorkerProcess] = []  # those that the policy knows, in its order
        self._recipe, self._epoch_sizes = recipe, tuple(epoch_sizes)
        self._first_sample = 0  # of the epoch, in the run
        self._rates: ScheduledRate | None = None  # made while workers start
        self._queue = policy.SampleQueue(epoch_sizes[0])
        self._traced_epoch = min(1, len(epoch_sizes) - 1)
        self._counts = Counts()
        self._offset_ns = 0  # of the clock of training
        self._has_begun, self._is_paused = False, True
        self._resumed_epoch: int | None = None  # of which some samples are done already
        self._resumed: list[tuple[dict[str, Any], Tensors]] = []  # what workers get before it
        self._status = Status(session, recipe.tokens_per_sample)
        self.pauses: Pauses | None = None
        self.processes = processes
        self.policy: policy.Policy | None = None
        self.log = BatchLog()
        self.lost: list[str] = []
        self.past: list[PastWorker] = []

    @property
    def trained_s(self) -> float:
        """Seconds of training so far, without what lies between epochs."""
        return self._counts.trained_ns * _NS

    @property
    def num_samples(self) -> int:
        """The samples of the run that are done."""
        return self._first_sample + self._queue.num_done

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Start the first workers, and have all try their speed at once, as they will work.

        Raises WorkerLost if none starts, and InvalidInput if a worker finds its settings wrong.
        """
        for spec in specs:
            self.processes.start(spec)
        settings, batch_size = self._settings, self._settings.batch_size
        num_steps = -(-sum(self._epoch_sizes) // batch_size)
        _, schedule = learning_by(self._recipe, settings, num_steps)
        self._rates = ScheduledRate(optimizer_by(self._recipe, settings), schedule, batch_size)
        # Trials begin together: workers that share cores or memory slow each other down in them.
        self._poll(lambda: all(worker.is_ready for worker in self.processes.running))
        for worker in self.processes.running:
            self._try(worker)
        self._has_begun = True
        self._poll(lambda: all(one.samples_per_s is not None for one in self.processes.running))

    def train_epoch(self, epoch: int, order: Tensor) -> tuple[float, float]:
        """Train on the samples once, in this order; return the mean loss and the seconds it took.

        Raises InvalidInput for a loss that is not finite, WorkerLost if no worker is left.
        """
        reach("epoch.begun", epoch=epoch)
        self._order[: len(order)].copy_(order)
        if epoch != self._resumed_epoch:
            self._queue, counts = policy.SampleQueue(len(order)), self._counts
            counts.epoch, counts.epoch_began_ns = epoch, counts.trained_ns
            self._first_sample = sum(self._epoch_sizes[:epoch])
            counts.loss_sum, counts.num_reported = 0.0, 0
        self._load_workers()
        self._go_on()
        while not self._queue.is_done:
            self._poll_once()
            if self.pauses is not None and self.pauses.is_due(self.num_samples):
                self._pause()
                self.pauses.use()
                self._go_on()
        self._pause()
        counts = self._counts
        mean_loss = counts.loss_sum / max(1, counts.num_reported)
        return mean_loss, (counts.trained_ns - counts.epoch_began_ns) * _NS

    def _pause(self) -> None:
        """Hand out nothing more, and wait until the workers have done what they were given."""
        self._is_paused = True
        self._poll(lambda: not any(worker.assigned for worker in self.processes.running))
        self._counts.trained_ns = time.monotonic_ns() - self._offset_ns

    def _go_on(self) -> None:
        self._is_paused = False
        self._offset_ns = time.monotonic_ns() - self._counts.trained_ns
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
        if received[0].batch == messages.READY:
            worker.is_ready = True
            if self._has_begun:
                self._try(worker)
        elif received[0].batch in (messages.SAVED, messages.LOADED):
            worker.is_asked = False
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
                    "learning_rate",
                    f"the loss of {worker.title} became {result.loss} in epoch "
                    f"{self._counts.epoch + 1}, on a batch of {size}",
                    hint=f"choose a smaller one{rate}",
                )
            # Batches of a GPU overlap: one takes as long as it ends after the one before.
            took_ns = result.ended_ns - max(result.started_ns, worker.ended_ns)
            worker.latest, worker.ended_ns = (work.size, took_ns * _NS), result.ended_ns
            self._count(worker, work, result.updates)
            self._counts.loss_sum += result.loss
            self._counts.num_reported += work.size
            done.append((work, result))
        self._hand_out(worker)  # before the log is written, for the worker waits
        for work, result in done:
            self._log(worker, work, result)

    def _count(self, worker: WorkerProcess, work: ExecuteWork, updates: int) -> None:
        counts = self._counts
        worker.complete(counts.num_updates - worker.num_updates)
        worker.updates += policy.updates_of(worker.spec, work.size, self._config.beta)
        worker.num_updates += updates
        counts.num_updates += updates
        self._queue.complete(work.places)

    def _log(self, worker: WorkerProcess, work: ExecuteWork, result: BatchResult) -> None:
        times_ns = (moment - self._offset_ns for moment in result[2:])
        trained = BatchResult(result.updates, result.loss, *times_ns)
        epoch, number = self._counts.epoch, worker.number
        self.log.append(BatchRecord(number, epoch, work.first, work.size, trained))
        self._progress.advance(work.size)
        self._status.add(work.size, result.loss)

    def _hand_out(self, worker: WorkerProcess) -> None:
        """Assign the next samples to a worker, if there are any, and it is no pause.

        Short batches come in advance, and a GPU has one being copied in beside those it works on.
        """
        if self._is_paused:
            return
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
        updates = self._expected_updates(worker)
        sizes = [one.size for one in self._active]
        worker.size = self.policy.next_batch(self._active.index(worker), updates, sizes)
        taken, counts = self._queue.take(worker.size), self._counts
        decay = self._config.staleness_decay
        rate = policy.rate_factor(len(taken), self._settings.batch_size, worker.staleness, decay)
        assert self._rates is not None
        rate *= self._rates.factor(self._first_sample + taken.start)
        traced = counts.epoch == self._traced_epoch and worker.num_traced < _MOST_TRACED
        worker.num_traced += traced
        number = counts.num_batches
        counts.num_batches += 1
        work = ExecuteWork(Command.TRAIN, number, taken.start, len(taken), rate, traced)
        worker.assign(work, counts.num_updates - worker.num_updates)

    def _expected_updates(self, worker: WorkerProcess) -> list[float]:
        """Return the updates of the active workers when this one begins its next batch.

        What is done is read from shared memory: workers report several batches at once, and later.
        """
        made, ahead = [], []
        for one in self._active:
            committed = int(self._committed[one.number])
            counted = [
                (work, policy.updates_of(one.spec, work.size, self._config.beta))
                for work in one.assigned
            ]
            made.append(one.updates + sum(n for work, n in counted if work.batch <= committed))
            ahead.append(
                [(one.expected_s(work.size), n) for work, n in counted if work.batch > committed]
            )
        return policy.expected_updates(self._active.index(worker), made, ahead)

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

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Return what a checkpoint has beside the model: in a pause, or between epochs.

        Tensors of workers are views of memory that the next call writes again.
        """
        if not self._is_paused:
            raise RuntimeError("the state of a run is asked for in a pause, or between its epochs")
        self._ask(self._active, Command.SAVE)
        log, workers = self.log.packed, list[dict[str, Any]]()
        tensors = {_LOG: torch.frombuffer(log, dtype=torch.uint8) if log else torch.empty(0).byte()}
        for worker in self._active:
            own, optimizers = read_state(worker.state)
            tensors |= {f"workers/{len(workers)}/{key}": one for key, one in own.items()}
            workers.append(worker.counts | {"optimizers": optimizers})
        started = self.processes.workers
        past = [PastWorker(one.name, str(one.spec), one.samples_per_s) for one in started]
        values = {
            "counts": asdict(self._counts),
            "epoch_sizes": list(self._epoch_sizes),
            "free": [[part.start, part.stop] for part in self._queue.free],
            "lost": list(self.lost),
            "past": [list(one) for one in self.past],
            "started": [list(one) for one in past],
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
        self._counts = counts = Counts(**values["counts"])
        begun = slice(counts.epoch + 1)
        sizes, before = self._epoch_sizes[begun], values["epoch_sizes"][begun]
        if list(sizes) != before:
            raise InvalidInput(
                "resume",
                f"the {len(before)} epochs that have begun had {sum(before):,} samples in the "
                f"run, and would have {sum(sizes):,} now",
                hint="go on with the same data and steps, or with more epochs",
            )
        free = [range(*part) for part in values["free"]]
        self._resumed_epoch, self._queue = counts.epoch, policy.SampleQueue(sizes[-1], free)
        self._first_sample = sum(sizes[:-1])
        self._traced_epoch = max(self._traced_epoch, counts.epoch if free else counts.epoch + 1)
        self.log = BatchLog(tensors[_LOG].numpy().tobytes())
        self.lost, self.past = list(values["lost"]), [PastWorker(*one) for one in values["past"]]
        saved = [one["spec"] for one in values["workers"]]
        if saved == list(map(str, specs)) and len(saved) == len(values["started"]):
            for index, one in enumerate(values["workers"]):
                self._resumed.append((one, within(tensors, f"workers/{index}/")))
        else:
            self.past += [PastWorker(*one) for one in values["started"]]
            logger.warning(
                "resume: workers %s go on with what %s have trained; their optimizers (momentum) "
                "and random numbers begin anew",
                ", ".join(map(str, specs)),
                ", ".join(saved),
            )
        self.processes.first_number = len(self.past)

    def _load_workers(self) -> None:
        """Give the workers what they had when the run was saved, if they are the same."""
        by_number = {worker.number: worker for worker in self._active}
        first, resumed, self._resumed = self.processes.first_number, self._resumed, []
        loading = []
        for number, (counts, tensors) in enumerate(resumed, first):
            if (worker := by_number.get(number)) is not None:
                worker.restore_counts(counts)
                write_state(worker.state, tensors, counts["optimizers"])
                loading.append(worker)
        self._ask(loading, Command.LOAD)

    def _ask(self, workers: Sequence[WorkerProcess], command: Command) -> None:
        """Have idle workers save or load their state, and wait for it."""
        for worker in workers:
            worker.is_asked = True
            worker.send(ExecuteWork(command))
        self._poll(lambda: not any(one.is_asked for one in workers if not one.is_ended))
