"""Built-in and user-defined policies for batch sizes (Ma, Rusu et al. 2020, section VI).

The coordinator and the plan use the same policy. It chooses the size of a batch by each worker's
number of updates (u in algorithm 2) and the size of each worker's latest batch (b).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Protocol

from paceline.core.balance import apportion
from paceline.core.error_lines import blaming
from paceline.core.errors import InvalidInput, shown
from paceline.core.importing import imported
from paceline.core.machine import DeviceKind
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec


class Policy(Protocol):
    """Decides the size of each worker's next batch; recreated whenever a worker is lost."""

    @property
    def most(self) -> Sequence[int]:
        """Each worker's maximum batch size; memory is reserved for a batch of this size."""

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size of a worker's next batch, at least 1.

        `updates`: the number of updates of each worker. `sizes`: the size of each worker's latest
        batch, or 0 before its first batch.
        """


@dataclass(frozen=True)
class Workers:
    """The workers and the settings for which a policy is created.

    `speeds`: the samples/s of each worker with batches of the workload's `batch_size`; equal before
    they are measured. `config`: options such as `cpu_batch` and `alpha`.
    """

    specs: tuple[WorkerSpec, ...]
    speeds: tuple[float, ...]
    batch_size: int
    config: Hogbatch


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """Changes batch sizes so that all workers make equally many updates.

    The policy is algorithm 2 of Ma, Rusu et al. 2020. The batch size of a worker
    with fewer updates than all others is divided by `alpha` and rounded down. The batch size of a
    worker with more updates than all others is multiplied by `alpha` and rounded up. A size stays
    between the worker's `least` and `most`. `first`: the sizes of the first batches.
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


class CheckedPolicy:
    """The user-defined policy package.module:Policy, whose returned batch sizes are checked.

    Raises InvalidInput if the class cannot be imported or created, or if its attribute `most` does
    not contain each worker's largest batch size.
    """

    def __init__(self, name: str, workers: Workers) -> None:
        self.name, make, num_workers = name, imported("policy", name), len(workers.specs)
        with blaming("policy", "cannot be created", got=name):
            self.policy = make(workers)
            _, self.most = self.policy.next_batch, tuple(self.policy.most)
        if len(self.most) != num_workers or not all(map(_is_size, self.most)):
            problem = f"has an invalid .most: {shown(self.most)}"
            hint = f"set .most to the largest batch of each of {num_workers} workers"
            raise InvalidInput("policy", problem, got=name, hint=hint)

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the next size; raise InvalidInput if the call fails or the size is invalid."""
        with blaming("policy", f"fails in next_batch for worker {worker}", got=self.name):
            size = self.policy.next_batch(worker, tuple(updates), tuple(sizes))
        if not _is_size(size) or size > self.most[worker]:
            problem = f"must return an integer from 1 to {self.most[worker]} for worker {worker}"
            raise InvalidInput("policy", f"{problem}, not {shown(size)}", got=self.name)
        return int(size)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def constant(sizes: Iterable[int]) -> AdaptivePolicy:
    """Return a policy that never changes these batch sizes."""
    fixed = tuple(sizes)
    return AdaptivePolicy(fixed, fixed, fixed)


def hogwild(workers: Workers) -> AdaptivePolicy:
    """Return a policy that assigns one sample to each thread of a worker."""
    return constant(spec.threads for spec in workers.specs)


def hogbatch(workers: Workers) -> AdaptivePolicy:
    """Return a policy that always assigns the workload's batch size (algorithm 1)."""
    return constant(workers.batch_size for _ in workers.specs)


def proportional(workers: Workers) -> AdaptivePolicy:
    """Return a policy with batch sizes in proportion to workers' speeds (Hadjis et al. 2016)."""
    total = workers.batch_size * len(workers.specs)
    return constant(max(1, size) for size in apportion(total, workers.speeds))


def cpu_gpu(workers: Workers) -> AdaptivePolicy:
    """Return a policy with small batches on CPUs, large batches on GPUs (section VI-B)."""
    return constant(adaptive(workers).first)


def adaptive(workers: Workers) -> AdaptivePolicy:
    """Return algorithm 2's policy; CPUs begin with the smallest size, GPUs with the largest."""
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
    """Create the configured policy for these workers; for the arguments see `Workers`."""
    workers = Workers(tuple(specs), tuple(speeds), batch_size, config)
    if config.policy in POLICIES:
        return POLICIES[config.policy](workers)
    return CheckedPolicy(config.policy, workers)
