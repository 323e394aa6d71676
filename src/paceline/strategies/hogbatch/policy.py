"""Batch-size policies, built in and user-defined (Ma, Rusu et al. 2020, section VI).

The coordinator and the plan ask the same policy before each batch. They pass the updates that each
worker has made (u of algorithm 2), and the sizes of the latest batches (b).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor, isinf
from typing import Any, NamedTuple, Protocol

from paceline.core.balance import apportion
from paceline.core.errors import InvalidInput, first_line, shown
from paceline.core.importing import imported
from paceline.core.machine import DeviceKind
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec

MOST_REPORTED = 32  # batches in one message of a worker
_PREFETCHED_S = 0.05  # seconds of work sent in advance; requesting a batch takes about 0.3 ms
_LEFT_OVER_PREFETCHED = 10  # at the end of an epoch, no worker waits for another worker's queue


class Policy(Protocol):
    """Decides the size of each worker's next batch.

    The coordinator makes a new policy whenever a worker is lost.
    """

    @property
    def most(self) -> Sequence[int]:
        """The largest batch of each worker, for which memory is reserved."""

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size of a worker's next batch, at least 1.

        `updates` and `sizes` are of all workers; a size is 0 before the worker's first batch.
        """


class SpeedTrial(NamedTuple):
    """A worker's measured seconds per batch, by batch size."""

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
    """The argument of a policy: the workers and the settings.

    `speeds`: samples/s with batches of `batch_size`; all equal before they are measured.
    `batch_size`: the workload's. `config`: options such as `cpu_batch` and `alpha`.
    """

    specs: tuple[WorkerSpec, ...]
    speeds: tuple[float, ...]
    batch_size: int
    config: Hogbatch


@dataclass(frozen=True, slots=True)
class FixedPolicy:
    """Batches of constant size."""

    most: tuple[int, ...]

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the worker's size."""
        return self.most[worker]


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """Algorithm 2: smaller batches for the worker with the fewest updates, larger for the first.

    A size is divided or multiplied by `alpha`, between the worker's `least` and `most`, and rounded
    so that it changes. `first`: the sizes of the first batches.
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


@dataclass(frozen=True, slots=True)
class CheckedPolicy:
    """A user-defined policy whose answers are checked."""

    name: str
    policy: Any
    most: tuple[int, ...]

    @classmethod
    def of(cls, name: str, workers: Workers) -> "CheckedPolicy":
        """Import package.module:Policy and call it with `workers`; InvalidInput if that fails."""
        make, num_workers = imported("policy", name), len(workers.specs)
        with _blaming("cannot be created", name):
            policy = make(workers)
            _, most = policy.next_batch, tuple(policy.most)
        if len(most) != num_workers or not all(map(_is_size, most)):
            hint = f"set .most to the largest batch of each of {num_workers} workers"
            raise InvalidInput(
                "policy", f"has an invalid .most: {shown(most)}", got=name, hint=hint
            )
        return cls(name, policy, most)

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the policy's size; InvalidInput if it raises or returns an invalid size."""
        with _blaming(f"does not return a size for worker {worker}", self.name):
            size = self.policy.next_batch(worker, tuple(updates), tuple(sizes))
        if not _is_size(size) or size > self.most[worker]:
            raise InvalidInput(
                "policy",
                f"must return an integer from 1 to {self.most[worker]} for worker {worker}, not "
                f"{shown(size)}",
                got=self.name,
            )
        return int(size)


@contextmanager
def _blaming(problem: str, name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InvalidInput("policy", f"{problem}: {first_line(error)}", got=name) from error


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def hogwild(workers: Workers) -> FixedPolicy:
    """Assign one sample to each thread."""
    return FixedPolicy(tuple(spec.threads for spec in workers.specs))


def hogbatch(workers: Workers) -> FixedPolicy:
    """Assign the workload's batch size to every worker: algorithm 1."""
    return FixedPolicy((workers.batch_size,) * len(workers.specs))


def proportional(workers: Workers) -> FixedPolicy:
    """Assign batches in proportion to the speeds, at least 1 sample (Hadjis et al. 2016)."""
    total = workers.batch_size * len(workers.specs)
    return FixedPolicy(tuple(max(1, size) for size in apportion(total, workers.speeds)))


def cpu_gpu(workers: Workers) -> FixedPolicy:
    """Assign small batches to CPUs and large batches to GPUs (section VI-B)."""
    return FixedPolicy(adaptive(workers).first)


def adaptive(workers: Workers) -> AdaptivePolicy:
    """Return algorithm 2: CPUs begin with their smallest batch, GPUs with their largest."""
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
    """Return the configured policy for these workers.

    `speeds`: samples/s with batches of the workload's `batch_size`. InvalidInput if a user-defined
    policy cannot be imported or created, or lacks an attribute of `Policy`.
    """
    workers = Workers(tuple(specs), tuple(speeds), batch_size, config)
    if config.policy in POLICIES:
        return POLICIES[config.policy](workers)
    return CheckedPolicy.of(config.policy, workers)


def expected_updates(
    worker: int, made: Sequence[float], ahead: Sequence[Sequence[tuple[float, float]]]
) -> list[float]:
    """Return the updates of all workers at the time when a worker begins its next batch.

    `made`: the updates in the model. `ahead`: for each worker the expected (seconds, updates) of
    its assigned, unfinished batches. If the worker itself has none, it begins now.
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
    """Return the updates of a batch: 1 on a GPU, beta per thread with a sample on a CPU."""
    return min(spec.threads, size) * (beta if spec.kind == DeviceKind.CPU else 1.0)


def rate_factor(size: int, batch_size: int, staleness: int, decay: float) -> float:
    """Scale a learning rate for `batch_size` to a batch's size (Goyal et al. 2017) and staleness.

    `staleness`: other workers' updates that the worker's latest batch has missed.
    """
    return size / batch_size / (1 + decay * staleness)


def wants_more(
    assigned_s: Sequence[float], left_s: float, depth: int = 1, *, prefetches: bool = True
) -> bool:
    """Return whether a worker gets another batch in addition to its assigned ones.

    `assigned_s`: their expected seconds, inf before the first result. `left_s`: the seconds until
    all workers together finish the epoch. A worker has `depth` batches in work, unless others would
    wait for it at the end of the epoch. Waking a process takes as long as a short batch, so short
    batches are assigned in advance if the worker `prefetches`.
    """
    if not assigned_s:
        return True
    if len(assigned_s) < depth:
        busy_s = sum(assigned_s) - assigned_s[0] / 2  # the first is on average half done
        return isinf(assigned_s[0]) or busy_s <= left_s
    most_s = min(_PREFETCHED_S, left_s / _LEFT_OVER_PREFETCHED) if prefetches else 0.0
    return len(assigned_s) < MOST_REPORTED and sum(assigned_s) < most_s
