"""The coordinator's decisions about batches, without processes and clocks.

next_work(worker)         return ExecuteWork: the worker's next samples and learning rate
complete(worker, result)  count the worker's oldest batch as done
drop(worker)              remove a lost worker, and unassign its unfinished samples
"""

import warnings
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, isinf, nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import InvalidInput
from paceline.exchange.step import Optimize
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import BatchResult, ExecuteWork, SpeedTrial
from paceline.strategies.hogbatch.policy import Policy, policy_of

MOST_REPORTED = 32  # maximum number of batches in one message of a worker
_MOST_TRACED = 50  # maximum number of traced batches per worker
_PREFETCHED_S = 0.05  # seconds of work per worker sent in advance; a request takes about 0.3 ms
# Prefetched work is at most 1/10 of the epoch's remaining time. So at the end of an epoch no worker
# waits long for batches that another worker has prefetched.
_LEFT_OVER_PREFETCHED = 10
_OWN_FIELDS = ("params", "lr", "initial_lr")  # parameter group fields that a schedule may change
_NS = 1e-9
# Attributes that a checkpoint contains: of `BatchScheduler`, and of each `WorkerProgress`.
_COUNTS = ("epoch", "loss_sum", "num_reported", "num_batches", "num_updates")
WORKER_COUNTS = ("num_updates", "size", "staleness")


class ScheduledRate:
    """Computes the factor by which a schedule changes the learning rate.

    The schedule makes one step per `batch_size` samples, even if workers use other batch sizes. The
    schedule controls an optimizer with one dummy parameter; all workers and parameter groups use
    the resulting factor. Raises InvalidInput if the schedule changes other fields than the learning
    rate, such as the momentum.
    """

    def __init__(
        self,
        optimizer: Optimize,
        schedule: Callable[[Optimizer], LRScheduler | None],
        batch_size: int,
    ) -> None:
        model = nn.ParameterList([torch.zeros(2, 2)])  # some optimizers accept only matrices
        made = optimizer(model)
        self._group = next(one for one in made.param_groups if one["params"])
        self._rate, self._batch_size, self._step = float(self._group["lr"]), batch_size, 0
        self._others = {key: one for key, one in self._group.items() if key not in _OWN_FIELDS}
        self._schedule = schedule(made)
        if self._schedule is None:
            return
        if not self._rate:
            raise InvalidInput("schedule", "requires a learning rate above 0")
        model[0].grad = torch.zeros_like(model[0])
        made.step()  # else PyTorch would warn that the schedule steps before the optimizer
        self.factor(0)  # checks the schedule

    def factor(self, num_samples: int) -> float:
        """Return the factor after a number of completed samples.

        The number may decrease when samples of a lost worker are assigned again; then the factor
        stays the same.
        """
        if self._schedule is None:
            return 1.0
        while self._step < num_samples // self._batch_size:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns when SequentialLR calls step(0)
                self._schedule.step()
            self._step += 1
        changed = [key for key, before in self._others.items() if self._group[key] != before]
        if changed:
            kind = type(self._schedule).__name__
            problem = f"must change only the learning rate, but {kind} changes {', '.join(changed)}"
            raise InvalidInput("schedule", problem, hint="for example, set cycle_momentum=False")
        return float(self._group["lr"]) / self._rate


@dataclass(eq=False, slots=True)
class WorkerProgress:
    """The assigned and completed work of a worker.

    `num_updates`: the number of updates of the model. `size`: the batch size that the policy
    returned last. `staleness`: the number of other workers' updates that the last completed batch
    missed. `latest`: samples and seconds of the last completed batch, which ended at `ended_ns`.
    `assigned`: up to `depth` running batches, then batches that the worker has not begun.
    `missed_from`: for each assigned batch that has read the model, the number of other workers'
    updates at that time.
    """

    number: int
    spec: WorkerSpec
    depth: int = 1
    trial: SpeedTrial | None = None
    num_updates: int = 0
    size: int = 0
    staleness: int = 0
    latest: tuple[int, float] = (1, inf)
    ended_ns: int = 0
    num_traced: int = 0
    assigned: deque[ExecuteWork] = field(default_factory=deque)
    missed_from: deque[int] = field(default_factory=deque)

    def expected_s(self, work: ExecuteWork) -> float:
        """Return the expected seconds of a batch.

        Scales the latest batch's seconds up for a larger batch, but not down for a smaller batch.
        """
        latest, seconds = self.latest
        return seconds * max(1.0, work.size / latest)

    def assign(self, work: ExecuteWork, num_others: int) -> None:
        """Add a batch; `num_others`: the number of other workers' updates so far."""
        self.assigned.append(work)
        self._begin(num_others)

    def complete(self, result: BatchResult, num_others: int) -> ExecuteWork:
        """Remove and return the oldest batch; `num_others`: other workers' updates so far."""
        work = self.assigned.popleft()
        # Batches of a GPU overlap, so a batch's time begins at the end of the previous batch.
        took_ns = result.ended_ns - max(result.started_ns, self.ended_ns)
        self.latest, self.ended_ns = (work.size, took_ns * _NS), result.ended_ns
        self.staleness = num_others - self.missed_from.popleft()
        self._begin(num_others)
        return work

    def _begin(self, num_others: int) -> None:
        # With `depth` > 1, the newest of `depth` running batches has not read the model: it waits
        # until the oldest has ended.
        if len(self.missed_from) < min(len(self.assigned), max(1, self.depth - 1)):
            self.missed_from.append(num_others)


class BatchScheduler:
    """Assigns samples to workers and counts completed batches.

    A batch is a range of positions in the epoch's random order of samples.

    `epoch_sizes`: the number of samples of each epoch. `committed`: a shared tensor, to which each
    worker writes the number of its last completed batch. `active`: the workers that get batches, in
    the policy's order. `policy`: None before the speed trials. `rate_at`: returns the factor of the
    learning rate after a number of samples of the run.

    For the current epoch, `free` has the unassigned ranges in ascending order, `num_done` counts
    samples trained on, `num_reported` counts samples with a known loss, and `loss_sum` sums these
    losses. `num_batches` and `num_updates` count over the whole run.
    """

    def __init__(
        self, config: Hogbatch, batch_size: int, epoch_sizes: Sequence[int], committed: Tensor
    ) -> None:
        self._config, self._batch_size, self._committed = config, batch_size, committed
        self._epoch_sizes = tuple(epoch_sizes)
        self._traced_epoch = min(1, len(epoch_sizes) - 1)
        self.num_batches = self.num_updates = 0
        self.begin_epoch(0)
        self.active: list[WorkerProgress] = []
        self.policy: Policy | None = None
        self.rate_at: Callable[[int], float] = lambda num_samples: 1.0

    @property
    def num_samples(self) -> int:
        """The number of samples that the run has trained on."""
        return self._first_sample + self.num_done

    @property
    def is_epoch_done(self) -> bool:
        """Whether the workers have trained on all samples of the current epoch."""
        return self.num_done == self._epoch_sizes[self.epoch]

    @property
    def _first_sample(self) -> int:
        """The number of samples in all epochs before the current epoch."""
        return sum(self._epoch_sizes[: self.epoch])

    @property
    def mean_loss(self) -> float:
        """The mean loss of the samples of the current epoch whose loss is known; 0 for none."""
        return self.loss_sum / max(1, self.num_reported)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: none of its samples is assigned."""
        self.epoch, self.free, self.num_done = epoch, [range(self._epoch_sizes[epoch])], 0
        self.loss_sum, self.num_reported = 0.0, 0

    def choose_policy(self, active: Sequence[WorkerProgress]) -> None:
        """Create the policy for these workers, whose speed trials must be done."""
        self.active = list(active)
        if self.active:
            specs = [worker.spec for worker in self.active]
            speeds = [worker.trial.samples_per_s if worker.trial else 1.0 for worker in self.active]
            self._samples_per_s = sum(speeds)
            self.policy = policy_of(self._config, specs, speeds, self._batch_size)

    def next_work(self, worker: WorkerProgress) -> ExecuteWork | None:
        """Assign and return a worker's next samples; None if it has enough work."""
        if not self.free or not self._wants_more(worker):
            return None
        assert self.policy is not None
        updates, sizes = self.expected_updates(worker), [one.size for one in self.active]
        worker.size = self.policy.next_batch(self.active.index(worker), updates, sizes)
        taken, rest = self.free[0][: worker.size], self.free[0][worker.size :]
        self.free[:1] = [rest] if rest else []
        # The rate was chosen for `batch_size`, and scales with the batch (Goyal et al. 2017).
        decay = self._config.staleness_decay
        rate = len(taken) / self._batch_size / (1 + decay * worker.staleness)
        rate *= self.rate_at(self._first_sample + taken.start)
        traced = self.epoch == self._traced_epoch and worker.num_traced < _MOST_TRACED
        step = worker.num_traced if traced else None
        worker.num_traced += traced
        work = ExecuteWork(self.num_batches, taken.start, len(taken), rate, step)
        self.num_batches += 1
        worker.assign(work, self.num_updates - worker.num_updates)
        return work

    def _wants_more(self, worker: WorkerProgress) -> bool:
        """Return whether a worker gets another batch in addition to its assigned batches."""
        if not worker.assigned:
            return True
        assigned_s = list(map(worker.expected_s, worker.assigned))
        # The seconds in which all workers together can finish the epoch.
        left_s = sum(map(len, self.free)) / self._samples_per_s
        if len(assigned_s) < worker.depth:
            # At the end of an epoch, assign no batch for which other workers would wait.
            busy_s = sum(assigned_s) - assigned_s[0] / 2  # the first batch is on average half done
            return isinf(assigned_s[0]) or busy_s <= left_s
        # With decay of the learning rate, a batch can be assigned only when the previous batch's
        # staleness is known. Without decay, assign short batches in advance, because waking a
        # waiting worker takes as long as a short batch.
        most_s = 0.0 if self._config.staleness_decay else _PREFETCHED_S
        most_s = min(most_s, left_s / _LEFT_OVER_PREFETCHED)
        return len(assigned_s) < MOST_REPORTED and sum(assigned_s) < most_s

    def expected_updates(self, worker: WorkerProgress) -> list[float]:
        """Estimate how many updates each worker will have made when `worker` begins a new batch.

        A new batch begins when all batches assigned to `worker` are done. Batches up to a worker's
        number in `committed` are done, even if not yet reported. `Hogbatch.weighted` weights
        the numbers.
        """
        done = {one: int(self._committed[one.number]) for one in self.active}
        unfinished = (work for work in worker.assigned if work.batch > done[worker])
        begins_s, found = sum(map(worker.expected_s, unfinished)), []
        for other in self.active:
            num_updates, left_s = other.num_updates, begins_s
            for work in other.assigned:
                if work.batch > done[other]:
                    left_s -= other.expected_s(work)
                if left_s < 0 and other is not worker:
                    break
                num_updates += other.spec.num_updates(work.size)
            found.append(self._config.weighted(other.spec, num_updates))
        return found

    def complete(self, worker: WorkerProgress, result: BatchResult) -> ExecuteWork:
        """Count a worker's oldest batch as done, and return the batch."""
        work = worker.complete(result, self.num_updates - worker.num_updates)
        num_updates = worker.spec.num_updates(work.size)
        worker.num_updates += num_updates
        self.num_updates += num_updates
        if isfinite(result.loss):
            self.loss_sum += result.loss
            self.num_reported += work.size
        self.num_done += work.size
        return work

    def drop(self, worker: WorkerProgress, now_ns: int) -> list[tuple[ExecuteWork, BatchResult]]:
        """Remove a lost worker; return its committed but unreported batches, with results.

        The samples of the worker's unfinished batches can be assigned again.
        """
        # The policy must leave out the lost worker before its samples are assigned again.
        self.choose_policy([one for one in self.active if one is not worker])
        committed, done = int(self._committed[worker.number]), []
        for work in tuple(worker.assigned):
            if work.batch > committed:
                worker.assigned.popleft()
                insort(self.free, work.places, key=lambda part: part.start)
            else:
                result = BatchResult(nan, *[now_ns] * 4)
                done.append((self.complete(worker, result), result))
        return done

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; requires that no batch is assigned."""
        return {
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "epoch_sizes": list(self._epoch_sizes),
            "free": [[part.start, part.stop] for part in self.free],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore what `state` returned.

        Raises InvalidInput if the saved epochs differ in size from those of this run.
        """
        epoch = values["counts"]["epoch"]
        begun = slice(epoch + 1)
        sizes, before = self._epoch_sizes[begun], values["epoch_sizes"][begun]
        if list(sizes) != before:
            counts = f"the saved run has {sum(before):,} samples and this run has {sum(sizes):,}"
            hint = "use the same data and the same number of steps, or increase --epochs"
            raise InvalidInput("resume", f"in the epochs until the checkpoint, {counts}", hint=hint)
        for name in _COUNTS:
            setattr(self, name, values["counts"][name])
        self.free = [range(*part) for part in values["free"]]
        self.num_done = sizes[-1] - sum(map(len, self.free))
        self._traced_epoch = max(self._traced_epoch, epoch if self.free else epoch + 1)
