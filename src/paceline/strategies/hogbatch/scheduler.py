"""The coordinator's decisions about batches, without processes and clocks.

next_work(worker)                return ExecuteWork: the worker's next samples and learning rate
complete(worker, updates, loss)  count the worker's oldest batch as done
drop(worker)                     remove a lost worker; its unfinished samples are free again
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any

from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.strategies.hogbatch import policy
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.messages import ExecuteWork

_MOST_TRACED = 50  # maximum number of traced batches per worker


class SampleQueue:
    """Assigns each sample of an epoch once, as ranges of the epoch's sample order.

    `free`: the unassigned ranges in ascending order, if an epoch is resumed.
    """

    def __init__(self, num_samples: int, free: Sequence[range] | None = None) -> None:
        self.free = [range(num_samples)] if free is None else list(free)
        self._assigned: set[range] = set()
        self.num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of unassigned samples."""
        return sum(map(len, self.free))

    @property
    def num_done(self) -> int:
        """The number of samples that have been used."""
        return self.num_samples - len(self) - sum(map(len, self._assigned))

    @property
    def is_done(self) -> bool:
        """Whether all samples have been used."""
        return not len(self) and not self._assigned

    def take(self, size: int) -> range:
        """Assign and return the first free range of samples, cut to at most `size` samples.

        The range is empty if no samples are free.
        """
        if not self.free:
            return range(0)
        taken, rest = self.free[0][:size], self.free[0][size:]
        self.free[:1] = [rest] if rest else []
        self._assigned.add(taken)
        return taken

    def complete(self, taken: range) -> None:
        """Record that assigned samples have been used; raise KeyError if they were not assigned."""
        self._assigned.remove(taken)

    def give_back(self, taken: range) -> None:
        """Return assigned but unused samples to the free samples."""
        self.complete(taken)
        insort(self.free, taken, key=lambda part: part.start)


@dataclass(slots=True)
class WorkerCounts:
    """Counts of a worker, saved in checkpoints.

    `updates`: the number of updates as the policy counts them, see `updates_of`.
    `num_updates`: the number of updates of the model.
    `size`: the batch size that the policy returned last for this worker.
    `staleness`: the number of other workers' updates that the last completed batch missed.
    """

    updates: float = 0.0
    num_updates: int = 0
    size: int = 0
    staleness: int = 0


@dataclass(eq=False, slots=True)
class WorkerProgress:
    """The assigned and completed work of a worker.

    `latest`: the number of samples and the seconds of the last completed batch.
    `ended_ns`: the time when that batch ended.
    `assigned`: up to `depth` running batches, then batches that the worker has not begun.
    `missed_from`: for each assigned batch that has read the model, the number of other workers'
    updates at that time.
    """

    number: int
    spec: WorkerSpec
    depth: int = 1
    trial: policy.SpeedTrial | None = None
    counts: WorkerCounts = field(default_factory=WorkerCounts)
    latest: tuple[int, float] = (1, inf)
    ended_ns: int = 0
    num_traced: int = 0
    assigned: deque[ExecuteWork] = field(default_factory=deque)
    missed_from: deque[int] = field(default_factory=deque)

    @property
    def samples_per_s(self) -> float | None:
        """The worker's speed in its trial; None before the trial."""
        return self.trial.samples_per_s if self.trial else None

    def expected_s(self, size: int) -> float:
        """Return the expected seconds of a batch of `size` samples.

        Scales the latest batch's seconds up for a larger batch, but not down for a smaller batch.
        """
        latest, seconds = self.latest
        return seconds * max(1.0, size / latest)

    def assign(self, work: ExecuteWork, num_others: int) -> None:
        """Add a batch; `num_others`: the number of other workers' updates so far."""
        self.assigned.append(work)
        self._begin(num_others)

    def complete(self, num_others: int) -> ExecuteWork:
        """Remove and return the oldest batch; `num_others`: see `assign`."""
        work = self.assigned.popleft()
        self.counts.staleness = num_others - self.missed_from.popleft()
        self._begin(num_others)
        return work

    def _begin(self, num_others: int) -> None:
        # If `depth` > 1 batches run, the newest batch reads the model after the oldest has ended.
        if len(self.missed_from) < min(len(self.assigned), max(1, self.depth - 1)):
            self.missed_from.append(num_others)


@dataclass(slots=True)
class Counts:
    """Counts of a run so far.

    `num_reported`: the number of samples with a known loss in the current epoch.
    `loss_sum`: the sum of these samples' losses.
    """

    epoch: int = 0
    loss_sum: float = 0.0
    num_reported: int = 0
    num_batches: int = 0
    num_updates: int = 0


class BatchScheduler:
    """Assigns samples to workers and counts completed batches.

    `epoch_sizes`: the number of samples of each epoch.
    `committed`: a shared tensor; each worker writes the number of its last completed batch.
    `active`: the workers that get batches, in the policy's order.
    `policy`: None until `choose_policy` is called after the speed trials.
    `rate_at`: returns the learning rate's factor after a number of samples of the run.
    """

    def __init__(
        self, config: Hogbatch, batch_size: int, epoch_sizes: Sequence[int], committed: Tensor
    ) -> None:
        self._config, self._batch_size, self._committed = config, batch_size, committed
        self._epoch_sizes = tuple(epoch_sizes)
        self._traced_epoch = min(1, len(epoch_sizes) - 1)
        self.queue = SampleQueue(epoch_sizes[0])
        self.counts = Counts()
        self.active: list[WorkerProgress] = []
        self.policy: policy.Policy | None = None
        self.rate_at: Callable[[int], float] = lambda num_samples: 1.0

    @property
    def num_samples(self) -> int:
        """The number of samples that the run has trained on."""
        return self._first_sample + self.queue.num_done

    @property
    def _first_sample(self) -> int:
        """The number of samples of the run before the current epoch."""
        return sum(self._epoch_sizes[: self.counts.epoch])

    @property
    def mean_loss(self) -> float:
        """The mean loss of the samples trained on in the current epoch."""
        return self.counts.loss_sum / max(1, self.counts.num_reported)

    def begin_epoch(self, epoch: int) -> bool:
        """Begin an epoch; return False if the epoch has already begun.

        Epoch 0, and the epoch in which a resumed run continues, have already begun.
        """
        if epoch == self.counts.epoch:
            return False
        self.queue = SampleQueue(self._epoch_sizes[epoch])
        self.counts.epoch, self.counts.loss_sum, self.counts.num_reported = epoch, 0.0, 0
        return True

    def choose_policy(self, active: Sequence[WorkerProgress]) -> None:
        """Create the policy for these workers, whose speed trials must be done."""
        self.active = list(active)
        if self.active:
            specs = [worker.spec for worker in self.active]
            speeds = [worker.samples_per_s or 1.0 for worker in self.active]
            self.policy = policy.policy_of(self._config, specs, speeds, self._batch_size)

    def next_work(self, worker: WorkerProgress) -> ExecuteWork | None:
        """Assign and return a worker's next samples; None if it has enough work."""
        if not self.queue:
            return None
        left_s = len(self.queue) / sum(one.samples_per_s or 0.0 for one in self.active)
        assigned_s = [worker.expected_s(one.size) for one in worker.assigned]
        # With decay, a batch can be assigned only when the previous batch's staleness is known.
        prefetches = self._config.staleness_decay == 0
        if not policy.wants_more(assigned_s, left_s, worker.depth, prefetches=prefetches):
            return None
        return self._assigned(worker)

    def _assigned(self, worker: WorkerProgress) -> ExecuteWork:
        assert self.policy is not None
        counts, own, decay = self.counts, worker.counts, self._config.staleness_decay
        updates, sizes = self.expected_updates(worker), [one.counts.size for one in self.active]
        own.size = self.policy.next_batch(self.active.index(worker), updates, sizes)
        taken = self.queue.take(own.size)
        rate = policy.rate_factor(len(taken), self._batch_size, own.staleness, decay)
        rate *= self.rate_at(self._first_sample + taken.start)
        traced = counts.epoch == self._traced_epoch and worker.num_traced < _MOST_TRACED
        worker.num_traced += traced
        number = counts.num_batches
        counts.num_batches += 1
        work = ExecuteWork(number, taken.start, len(taken), rate, traced)
        worker.assign(work, counts.num_updates - own.num_updates)
        return work

    def expected_updates(self, worker: WorkerProgress) -> list[float]:
        """Return each active worker's expected updates when `worker` begins its next batch.

        A done but unreported batch counts: its number is at most the worker's value in `committed`.
        """
        made, ahead = [], []
        for one in self.active:
            committed = int(self._committed[one.number])
            counted = [(work, self._updates_of(one, work)) for work in one.assigned]
            done = sum(n for work, n in counted if work.batch <= committed)
            made.append(one.counts.updates + done)
            ahead.append(
                [(one.expected_s(work.size), n) for work, n in counted if work.batch > committed]
            )
        return policy.expected_updates(self.active.index(worker), made, ahead)

    def _updates_of(self, worker: WorkerProgress, work: ExecuteWork) -> float:
        return policy.updates_of(worker.spec, work.size, self._config.beta)

    def complete(self, worker: WorkerProgress, updates: int, loss: float | None) -> ExecuteWork:
        """Count a worker's oldest batch as done, and return the batch.

        `loss`: the sum of the losses of the batch's samples; None if unknown.
        """
        counts, own = self.counts, worker.counts
        work = worker.complete(counts.num_updates - own.num_updates)
        own.updates += self._updates_of(worker, work)
        own.num_updates += updates
        counts.num_updates += updates
        if loss is not None:
            counts.loss_sum += loss
            counts.num_reported += work.size
        self.queue.complete(work.places)
        return work

    def drop(self, worker: WorkerProgress) -> list[tuple[ExecuteWork, int]]:
        """Remove a lost worker; return its committed, unreported batches and their updates.

        The samples of the worker's other batches become free again.
        """
        # The policy must leave out the lost worker before its samples are assigned again.
        self.choose_policy([one for one in self.active if one is not worker])
        done = []
        for work in tuple(worker.assigned):
            if int(self._committed[worker.number]) < work.batch:
                worker.assigned.popleft()
                self.queue.give_back(work.places)
                continue
            updates = min(worker.spec.threads, work.size)
            done.append((self.complete(worker, updates, None), updates))
        return done

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; requires that no batch is assigned."""
        return {
            "counts": asdict(self.counts),
            "epoch_sizes": list(self._epoch_sizes),
            "free": [[part.start, part.stop] for part in self.queue.free],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore a `state`; raise InvalidInput if the saved run has other epoch sizes."""
        counts = Counts(**values["counts"])
        begun = slice(counts.epoch + 1)
        sizes, before = self._epoch_sizes[begun], values["epoch_sizes"][begun]
        if list(sizes) != before:
            raise InvalidInput(
                "resume",
                f"up to the checkpoint's epoch, the saved run has {sum(before):,} samples and this "
                f"run has {sum(sizes):,}",
                hint="use the same data and the same number of steps, or increase --epochs",
            )
        free = [range(*part) for part in values["free"]]
        self.counts, self.queue = counts, SampleQueue(sizes[-1], free)
        self._traced_epoch = max(self._traced_epoch, counts.epoch if free else counts.epoch + 1)
