"""Built-in and user-defined policies for batch sizes (Ma, Rusu et al. 2020, section VI).

The coordinator and the plan ask the same policy for the size of each batch. The arguments are each
worker's number of updates (u in algorithm 2) and the size of each worker's latest batch (b).
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

MOST_REPORTED = 32  # maximum number of batches in one message of a worker
_PREFETCHED_S = 0.05  # seconds of work sent in advance, because a request takes about 0.3 ms
# Prefetched work is at most 1/10 of the epoch's remaining time. So at the end of an epoch no worker
# waits long for batches that another worker has prefetched.
_LEFT_OVER_PREFETCHED = 10


class Policy(Protocol):
    """Decides the size of each worker's next batch.

    The coordinator makes a new policy whenever a worker is lost.
    """

    @property
    def most(self) -> Sequence[int]:
        """Each worker's maximum batch size; memory is reserved for a batch of this size."""

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size of a worker's next batch, at least 1.

        `updates`: the number of updates of each worker. `sizes`: the size of each worker's latest
        batch, or 0 before its first batch.
        """


class SpeedTrial(NamedTuple):
    """A worker's speed trial; `seconds` maps each batch size to the measured seconds per batch."""

    number: int
    spec: WorkerSpec
    seconds: Mapping[int, float]

    @property
    def samples_per_s(self) -> float:
        """The speed with the largest batch size of the trial."""
        size = max(self.seconds)
        return size / self.seconds[size]


@dataclass(frozen=True)
class Workers:
    """The workers and the settings for which a policy is created.

    `speeds`: the samples/s of each worker with batches of `batch_size`; before they are measured,
    all speeds are equal. `batch_size`: the batch size of the workload. `config`: options such as
    `cpu_batch` and `alpha`.
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
        """Return the worker's constant batch size."""
        return self.most[worker]


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """Algorithm 2, which changes batch sizes so that all workers make equally many updates.

    A worker with fewer updates than all other workers gets its size divided by `alpha`. A worker
    with more updates than all other workers gets its size multiplied by `alpha`. Quotients are
    rounded down, and products are rounded up. A size stays between the worker's `least` and `most`.
    `first`: the sizes of the first batches.
    """

    first: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    alpha: float = 2.0

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the next size according to algorithm 2."""
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
    """A user-defined policy whose returned batch sizes are checked."""

    name: str
    policy: Any
    most: tuple[int, ...]

    @classmethod
    def of(cls, name: str, workers: Workers) -> "CheckedPolicy":
        """Import package.module:Policy and call it with `workers`.

        Raises InvalidInput if the import or the call fails, or if `.most` is invalid.
        """
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
        """Return the next size; raise InvalidInput if the call fails or the size is invalid."""
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
    """Assign one sample to each thread of a worker."""
    return FixedPolicy(tuple(spec.threads for spec in workers.specs))


def hogbatch(workers: Workers) -> FixedPolicy:
    """Assign batches of the workload's batch size to every worker (algorithm 1)."""
    return FixedPolicy((workers.batch_size,) * len(workers.specs))


def proportional(workers: Workers) -> FixedPolicy:
    """Assign batch sizes in proportion to the workers' speeds (Hadjis et al. 2016)."""
    total = workers.batch_size * len(workers.specs)
    return FixedPolicy(tuple(max(1, size) for size in apportion(total, workers.speeds)))


def cpu_gpu(workers: Workers) -> FixedPolicy:
    """Assign small batches to CPUs and large batches to GPUs (section VI-B)."""
    return FixedPolicy(adaptive(workers).first)


def adaptive(workers: Workers) -> AdaptivePolicy:
    """Adapt batch sizes (algorithm 2); CPUs begin with the smallest size, GPUs with the largest."""
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
    """Create the configured policy for these workers.

    `speeds`: samples/s with batches of the workload's `batch_size`. Raises InvalidInput if a
    user-defined policy cannot be imported or created, or lacks an attribute of `Policy`.
    """
    workers = Workers(tuple(specs), tuple(speeds), batch_size, config)
    if config.policy in POLICIES:
        return POLICIES[config.policy](workers)
    return CheckedPolicy.of(config.policy, workers)


def expected_updates(
    worker: int, made: Sequence[float], ahead: Sequence[Sequence[tuple[float, float]]]
) -> list[float]:
    """Return each worker's expected number of updates when `worker` begins its next batch.

    `made`: each worker's number of updates in the model. `ahead`: each worker's assigned,
    unfinished batches, as pairs of expected seconds and updates. If `worker` has no such batch, its
    next batch begins now.
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
    """Return the number of updates that a policy counts for a batch.

    A batch counts as one update on a GPU, and as `beta` updates per used thread on a CPU.
    """
    return min(spec.threads, size) * (beta if spec.kind == DeviceKind.CPU else 1.0)


def rate_factor(size: int, batch_size: int, staleness: int, decay: float) -> float:
    """Return the factor of the learning rate for a batch of `size` samples.

    The learning rate was chosen for `batch_size` and scales linearly with `size` (Goyal et al.
    2017). `staleness`: the number of updates by other workers while the worker's latest batch ran;
    the factor is divided by 1 + `decay` * `staleness`.
    """
    return size / batch_size / (1 + decay * staleness)


def wants_more(
    assigned_s: Sequence[float], left_s: float, depth: int = 1, *, prefetches: bool = True
) -> bool:
    """Return whether a worker gets another batch in addition to its assigned batches.

    `assigned_s`: the expected seconds of the assigned batches; inf before the first result.
    `left_s`: the seconds in which all workers together can finish the epoch.
    `depth`: the number of batches that the worker overlaps. The worker gets fewer batches if other
    workers would wait for this worker at the end of the epoch.
    `prefetches`: whether to assign short batches in advance. Waking a worker that waits for a batch
    takes as long as a short batch.
    """
    if not assigned_s:
        return True
    if len(assigned_s) < depth:
        busy_s = sum(assigned_s) - assigned_s[0] / 2  # the first batch is half done on average
        return isinf(assigned_s[0]) or busy_s <= left_s
    most_s = min(_PREFETCHED_S, left_s / _LEFT_OVER_PREFETCHED) if prefetches else 0.0
    return len(assigned_s) < MOST_REPORTED and sum(assigned_s) < most_s
