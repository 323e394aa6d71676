"""The policies that size batches, and the samples left (Ma, Rusu et al. 2020, section VI).

Coordinator and plan ask the same policy whenever a worker asks for work, and tell it the same: the
updates that each worker has made (u of algorithm 2), and the sizes of the latest batches (b).
"""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, isinf
from typing import NamedTuple, Protocol

from paceline.core.balance import apportion
from paceline.core.machine import DeviceKind
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.own_policy import OwnPolicy

MOST_REPORTED = 32  # batches in one message of a worker
_PREFETCHED_S = 0.05  # of work; asking for the next batch takes some 0.3 ms
_LEFT_OVER_PREFETCHED = 10  # so that at the end of an epoch no worker waits for another's queue


class Policy(Protocol):
    """Decides how large the next batch of a worker is.

    One is made for some workers, and anew whenever one is lost. `most`: the largest batch
    of each, for which there has to be memory, and samples.
    """

    @property
    def most(self) -> Sequence[int]:
        """The largest batch of each worker."""

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size of the batch that the worker gets now, at least 1.

        `updates` and `sizes` are those of all workers; a size is 0 before the first batch.
        """


class SpeedTrial(NamedTuple):
    """A worker, and the seconds that its batches of some sizes took."""

    number: int
    spec: WorkerSpec
    seconds: Mapping[int, float]

    @property
    def samples_per_s(self) -> float:
        """The speed with batches of the largest size."""
        size = max(self.seconds)
        return size / self.seconds[size]


@dataclass(frozen=True)
class Workers:
    """The workers that a policy is made for, and what was asked for.

    `specs`: their devices, by `kind`, `threads` and `slow`. `speeds`: their samples/s with batches
    of `batch_size`, the workload's; before they are known all are equal. `config`: the settings of
    the strategy, such as `cpu_batch` and `alpha`.
    """

    specs: tuple[WorkerSpec, ...]
    speeds: tuple[float, ...]
    batch_size: int
    config: Hogbatch


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Batches that never change."""

    most: tuple[int, ...]

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the worker's size."""
        return self.most[worker]


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """Algorithm 2: a worker behind all others in updates gets less, one ahead of all gets more.

    A size is divided or multiplied by `alpha`, down to the worker's `least` and up to its `most`,
    and rounded so that it changes. `first`: the sizes of the first batches.
    """

    first: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    alpha: float = 2.0

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size by algorithm 2."""
        size, least, most = sizes[worker], self.least[worker], self.most[worker]
        if not size or least == most:
            return self.first[worker]
        others = [made for other, made in enumerate(updates) if other != worker]
        if others and updates[worker] < min(others):
            return max(floor(size / self.alpha), least)
        if others and updates[worker] > max(others):
            return min(ceil(size * self.alpha), most)
        return size


def hogwild(workers: Workers) -> FixedPolicy:
    """Return the policy of one sample for each thread."""
    return FixedPolicy(tuple(spec.threads for spec in workers.specs))


def hogbatch(workers: Workers) -> FixedPolicy:
    """Return algorithm 1: the same batch for all."""
    return FixedPolicy((workers.batch_size,) * len(workers.specs))


def proportional(workers: Workers) -> FixedPolicy:
    """Return the policy of batches in proportion to the speeds.

    So Omnivore splits a batch (Hadjis et al. 2016): all take equally long, if the speeds hold. A
    worker gets at least one sample.
    """
    total = workers.batch_size * len(workers.specs)
    return FixedPolicy(tuple(max(1, size) for size in apportion(total, workers.speeds)))


def cpu_gpu(workers: Workers) -> FixedPolicy:
    """Return the policy of small batches on cores and large ones on GPUs (section VI-B)."""
    return FixedPolicy(adaptive(workers).first)


def adaptive(workers: Workers) -> AdaptivePolicy:
    """Return algorithm 2: cores begin with their smallest batch, GPUs with their largest."""
    config, size = workers.config, workers.batch_size
    gpu_batch = config.gpu_batch or (max(1, size // 64), size)
    first, least, most = [], [], []
    for spec in workers.specs:
        on_cores = spec.kind == DeviceKind.CPU
        small, large = (spec.threads * n for n in config.cpu_batch) if on_cores else gpu_batch
        first.append(small if on_cores else large)
        least.append(small)
        most.append(large)
    return AdaptivePolicy(tuple(first), tuple(least), tuple(most), config.alpha)


POLICIES: dict[str, Callable[[Workers], Policy]] = {
    one.__name__: one for one in (hogwild, hogbatch, cpu_gpu, proportional, adaptive)
}


def policy_of(
    config: Hogbatch, specs: Sequence[WorkerSpec], speeds: Sequence[float], batch_size: int
) -> Policy:
    """Return the policy of a configuration for these workers and a workload's batch size.

    `speeds` are the workers' samples/s with batches of the workload's size. InvalidInput if a
    policy of the user's cannot be imported or made, or lacks what `Policy` has.
    """
    workers = Workers(tuple(specs), tuple(speeds), batch_size, config)
    if config.policy in POLICIES:
        return POLICIES[config.policy](workers)
    return OwnPolicy.of(config.policy, workers)


def expected_updates(
    worker: int, made: Sequence[float], ahead: Sequence[Sequence[tuple[float, float]]]
) -> list[float]:
    """Return the updates of all workers by the time at which a worker begins its next batch.

    `made`: those that are in the model. `ahead`: of each worker the (seconds, updates) that are
    expected of the batches that it was given and has not done. A worker that has none asks when all
    it did is known: then the others count with what they have done, and with nothing more.
    """
    begins_s = sum(seconds for seconds, _ in ahead[worker])
    found = []
    for other, (done, batches) in enumerate(zip(made, ahead, strict=True)):
        left_s, counted = begins_s, done
        for seconds, updates in batches:
            left_s -= seconds
            if left_s < 0 and other != worker:
                break
            counted += updates
        found.append(counted)
    return found


def updates_of(spec: WorkerSpec, size: float, beta: float) -> float:
    """Return the updates that a batch counts for: one of a GPU, beta for each thread of a CPU.

    A thread without a sample makes none.
    """
    return min(spec.threads, size) * (beta if spec.kind == DeviceKind.CPU else 1.0)


def rate_factor(size: int, batch_size: int, staleness: int, decay: float) -> float:
    """Return the factor of the learning rate, which was chosen for `batch_size`.

    It is in proportion to the batch (Goyal et al. 2017), and smaller the more updates of others the
    worker's latest batch has missed.
    """
    return size / batch_size / (1 + decay * staleness)


def wants_more(
    assigned_s: Sequence[float], left_s: float, depth: int = 1, *, prefetches: bool = True
) -> bool:
    """Return True if a worker gets another batch beside those that it has been assigned.

    `assigned_s`: their expected seconds, inf as long as no batch is done. `left_s`: the seconds
    that all workers together need for the rest of the epoch. A worker gets the `depth` of batches
    that it has in work at once, unless others would have to wait for it at the end of the epoch.
    And a message wakes a process, which takes as long as a short batch does: short batches are
    given in advance, if the worker `prefetches`.
    """
    if not assigned_s:
        return True
    if len(assigned_s) < depth:
        busy_s = sum(assigned_s) - assigned_s[0] / 2  # the first is on its way
        return isinf(assigned_s[0]) or busy_s <= left_s
    most_s = min(_PREFETCHED_S, left_s / _LEFT_OVER_PREFETCHED) if prefetches else 0.0
    return len(assigned_s) < MOST_REPORTED and sum(assigned_s) < most_s


class SampleQueue:
    """The samples of an epoch that no worker has yet, as ranges of the epoch's order.

    Every sample is handed out once, and once more if it comes back unused. `free`: those that are
    left of an epoch that is resumed, ascending. Raises KeyError for ranges that are completed or
    given back without having been handed out.
    """

    def __init__(self, num_samples: int, free: Sequence[range] | None = None) -> None:
        self.free = [range(num_samples)] if free is None else list(free)
        self._assigned: set[range] = set()
        self.num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples that can be handed out."""
        return sum(map(len, self.free))

    @property
    def num_done(self) -> int:
        """The samples that have been used."""
        return self.num_samples - len(self) - sum(map(len, self._assigned))

    @property
    def is_done(self) -> bool:
        """True if all samples have been used."""
        return not len(self) and not self._assigned

    def take(self, size: int) -> range:
        """Hand out at most `size` samples.

        They are fewer, or none, at the end, and fewer where samples came back between others.
        """
        if not self.free:
            return range(0)
        taken, rest = self.free[0][:size], self.free[0][size:]
        self.free[:1] = [rest] if rest else []
        self._assigned.add(taken)
        return taken

    def complete(self, taken: range) -> None:
        """Record that samples have been used."""
        self._assigned.remove(taken)

    def give_back(self, taken: range) -> None:
        """Take samples back that were not used."""
        self.complete(taken)
        insort(self.free, taken, key=lambda part: part.start)
