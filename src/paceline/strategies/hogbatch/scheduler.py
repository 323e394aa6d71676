"""The coordinator's decisions: which worker gets which samples, without processes and clocks.

next_work(worker)           ExecuteWork: its next samples, and at what learning rate
complete(worker, updates)   its oldest batch is done
drop(worker)                it is lost: what it has not done goes to the others
"""

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

_MOST_TRACED = 50  # batches of each worker


@dataclass(slots=True)
class WorkerCounts:
    """Counts of a worker, as a checkpoint has them.

    `updates`: as the policy counts them, and `num_updates` all of them. `size`: that of its last
    batch by the policy. `staleness`: the updates of others that its latest batch has missed.
    """

    updates: float = 0.0
    num_updates: int = 0
    size: int = 0
    staleness: int = 0


@dataclass(eq=False, slots=True)
class WorkerProgress:
    """Work given to a worker and done by it.

    `latest`: the samples of a batch, and the seconds it took; `ended_ns` when it was done.
    `assigned`: the batches that it works on, of which it has up to `depth` in work, and those after
    them. `missed_from`: the updates of others when each of the batches read the model on which it
    works now.
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
        """Its speed in the trial, None before it."""
        return self.trial.samples_per_s if self.trial else None

    def expected_s(self, size: int) -> float:
        """Return the expected seconds of a batch: one smaller than the latest takes as long."""
        latest, seconds = self.latest
        return seconds * max(1.0, size / latest)

    def assign(self, work: ExecuteWork, num_others: int) -> None:
        """Add a batch, when others have made that many updates: it may begin with it now."""
        self.assigned.append(work)
        self._begin(num_others)

    def complete(self, num_others: int) -> ExecuteWork:
        """Remove the oldest batch, and begin the next, if any; others have made so many updates."""
        work = self.assigned.popleft()
        self.counts.staleness = num_others - self.missed_from.popleft()
        self._begin(num_others)
        return work

    def _begin(self, num_others: int) -> None:
        # The last of several batches waits for the end of the oldest before it reads the model.
        if len(self.missed_from) < min(len(self.assigned), max(1, self.depth - 1)):
            self.missed_from.append(num_others)


@dataclass(slots=True)
class Counts:
    """Counts of a run so far.

    `loss_sum` is that of the epoch's samples, of which `num_reported` came with their loss.
    """

    epoch: int = 0
    loss_sum: float = 0.0
    num_reported: int = 0
    num_batches: int = 0
    num_updates: int = 0


class BatchScheduler:
    """Decides which samples workers get, and counts what they have done.

    `epoch_sizes`: the samples of each epoch of the run. `committed`: for each worker the number of
    the batch that it has last done, which it writes itself. `active`: the workers that the policy
    knows, in its order; there is no `policy` before their trials. `rate_at`: the factor of the
    learning rate after so many samples of the run.
    """

    def __init__(
        self, config: Hogbatch, batch_size: int, epoch_sizes: Sequence[int], committed: Tensor
    ) -> None:
        self._config, self._batch_size, self._committed = config, batch_size, committed
        self._epoch_sizes = tuple(epoch_sizes)
        self._traced_epoch = min(1, len(epoch_sizes) - 1)
        self.queue = policy.SampleQueue(epoch_sizes[0])
        self.counts = Counts()
        self.active: list[WorkerProgress] = []
        self.policy: policy.Policy | None = None
        self.rate_at: Callable[[int], float] = lambda num_samples: 1.0

    @property
    def num_samples(self) -> int:
        """The samples of the run that are done."""
        return self._first_sample + self.queue.num_done

    @property
    def _first_sample(self) -> int:
        """The place of the epoch's first sample in the run."""
        return sum(self._epoch_sizes[: self.counts.epoch])

    @property
    def mean_loss(self) -> float:
        """The mean loss of the epoch's samples so far."""
        return self.counts.loss_sum / max(1, self.counts.num_reported)

    def begin_epoch(self, epoch: int) -> bool:
        """Begin an epoch; return False if it has begun already, as where the run is resumed."""
        if epoch == self.counts.epoch:
            return False
        self.queue = policy.SampleQueue(self._epoch_sizes[epoch])
        self.counts.epoch, self.counts.loss_sum, self.counts.num_reported = epoch, 0.0, 0
        return True

    def choose_policy(self, active: Sequence[WorkerProgress]) -> None:
        """Make the policy for these workers, which have tried their speed."""
        self.active = list(active)
        if self.active:
            specs = [worker.spec for worker in self.active]
            speeds = [worker.samples_per_s or 1.0 for worker in self.active]
            self.policy = policy.policy_of(self._config, specs, speeds, self._batch_size)

    def next_work(self, worker: WorkerProgress) -> ExecuteWork | None:
        """Assign the next samples to a worker, and return them; None if it gets nothing now.

        Short batches come in advance, and a GPU has one being copied in beside those it works on.
        """
        if not self.queue:
            return None
        left_s = len(self.queue) / sum(one.samples_per_s or 0.0 for one in self.active)
        assigned_s = [worker.expected_s(one.size) for one in worker.assigned]
        # Learning rates may fall with what its latest batch has missed: then none is given early.
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
        """Return the updates of the active workers when this one begins its next batch.

        What is done is read from shared memory: workers report several batches at once, and later.
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
        """Count the oldest batch of a worker, and return it; `loss` is the sum, if it is known."""
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
        """Go on without a worker; return the batches that it has done, with their updates.

        Their updates are in the model, although they were not reported. The others' samples can be
        handed out again.
        """
        # Before samples go to the others.
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
        """Return what a run goes on from, as plain values, when nothing is assigned."""
        return {
            "counts": asdict(self.counts),
            "epoch_sizes": list(self._epoch_sizes),
            "free": [[part.start, part.stop] for part in self.queue.free],
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Go on from such a state; InvalidInput if it is of epochs of other sizes."""
        counts = Counts(**values["counts"])
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
        self.counts, self.queue = counts, policy.SampleQueue(sizes[-1], free)
        self._traced_epoch = max(self._traced_epoch, counts.epoch if free else counts.epoch + 1)
