"""Who gets how many samples next: the algorithms of Ma, Rusu et al. 2020, section VI.

A policy is a pure object that the coordinator asks whenever a worker asks it for work. What it may
know is in `Counts`; plan and runner give it the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Literal, NamedTuple, Protocol

from paceline.strategies.hogbatch.config import Hogbatch


class Worker(NamedTuple):
    """What a policy is made for: the kind of a worker, its threads, and its speed.

    A GPU has one thread. `samples_per_s` is what it reaches on the workload's batch size.
    """

    kind: Literal["cpu", "gpu"]
    threads: int
    samples_per_s: float


class Counts(NamedTuple):
    """What the coordinator knows when a worker asks for work.

    `updates` are those that each worker has made so far (algorithm 2's u), and `batch_sizes` the
    sizes that the policy last said for each (b); 0 before its first batch.
    """

    updates: Sequence[float]
    batch_sizes: Sequence[int]


class Policy(Protocol):
    """How many samples the next batch of a worker has."""

    def next_batch(self, worker: int, counts: Counts) -> int:
        """Return the size of the batch that the worker gets now, at least 1."""
        ...

    def largest_batch(self, worker: int) -> int:
        """Return the size that no batch of the worker exceeds."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Every worker always gets as many samples (algorithm 1, if all get the same)."""

    sizes: tuple[int, ...]

    def next_batch(self, worker: int, counts: Counts) -> int:
        """Return the worker's size."""
        return self.sizes[worker]

    def largest_batch(self, worker: int) -> int:
        """Return the worker's size."""
        return self.sizes[worker]


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Algorithm 2: who is behind all others in updates gets less, who is ahead of all gets more.

    A size is divided or multiplied by `alpha`, down to the worker's `least` and up to its `most`,
    and rounded so that it changes. `first` are the sizes to begin with.
    """

    first: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    alpha: float = 2.0

    def next_batch(self, worker: int, counts: Counts) -> int:
        """Return the worker's last size, smaller, larger, or as it was."""
        size, made = counts.batch_sizes[worker], counts.updates[worker]
        others = [updates for i, updates in enumerate(counts.updates) if i != worker]
        if not size:
            return self.first[worker]
        if others and made < min(others):
            return max(floor(size / self.alpha), self.least[worker])
        if others and made > max(others):
            return min(ceil(size * self.alpha), self.most[worker])
        return size

    def largest_batch(self, worker: int) -> int:
        """Return the worker's upper threshold."""
        return self.most[worker]


def proportional(speeds: Sequence[float], total: int) -> Fixed:
    """Return fixed batches of `total` samples together, in proportion to the workers' speeds.

    So Omnivore splits a batch (Hadjis et al. 2016): all take equally long, if the speeds hold. What
    rounding down leaves goes where it took most. A worker gets one sample at the least.
    """
    exact = [total * speed / sum(speeds) for speed in speeds]
    sizes = [floor(share) for share in exact]
    by_loss = sorted(range(len(exact)), key=lambda i: sizes[i] - exact[i])
    for i in by_loss[: total - sum(sizes)]:
        sizes[i] += 1
    return Fixed(tuple(max(1, size) for size in sizes))


def policy_of(config: Hogbatch, workers: Sequence[Worker], batch_size: int) -> Policy:
    """Return the policy of a configuration for these workers and a workload's batch size."""
    threads = tuple(worker.threads for worker in workers)
    if config.policy == "hogwild":
        return Fixed(threads)
    if config.policy == "hogbatch":
        return Fixed((batch_size,) * len(workers))
    if config.policy == "proportional":
        speeds = [worker.samples_per_s for worker in workers]
        return proportional(speeds, batch_size * len(workers))
    gpu_batch = config.gpu_batch or (max(1, batch_size // 64), batch_size)
    ranges = [
        tuple(worker.threads * size for size in config.cpu_batch)
        if worker.kind == "cpu"
        else gpu_batch
        for worker in workers
    ]
    least, most = (tuple(sizes) for sizes in zip(*ranges, strict=True))
    first = tuple(
        small if worker.kind == "cpu" else large
        for worker, small, large in zip(workers, least, most, strict=True)
    )
    return (
        Fixed(first) if config.policy == "cpu_gpu" else Adaptive(first, least, most, config.alpha)
    )


def updates_of(worker: Worker, size: int, beta: float) -> float:
    """Return as how many updates a batch counts: one of a GPU, beta for each thread of a CPU.

    A thread without a sample makes none.
    """
    return min(worker.threads, size) * (beta if worker.kind == "cpu" else 1.0)


def rate_factor(size: int, batch_size: int, staleness: int, decay: float) -> float:
    """Return by what the learning rate, which was chosen for `batch_size`, is multiplied.

    It is in proportion to the batch (Goyal et al. 2017), and smaller the more updates of others the
    worker's latest batch has missed.
    """
    return size / batch_size / (1 + decay * staleness)
