"""The policies that size batches, and the samples left (Ma, Rusu et al. 2020, section VI).

Coordinator and plan ask the same policy whenever a worker asks for work, and tell it the same: the
updates that each worker has made (u of algorithm 2), and the sizes of the latest batches (b).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isinf
from typing import Self

from paceline.core.machine import DeviceKind
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec

MOST_REPORTED = 32  # batches in one message of a worker
_PREFETCHED_S = 0.05  # of work; asking for the next batch takes some 0.3 ms
_LEFT_OVER_PREFETCHED = 10  # so that at the end of an epoch no worker waits for another's queue


@dataclass(frozen=True, slots=True)
class Policy:
    """Algorithm 2: a worker behind all others in updates gets less, one ahead of all gets more.

    A size is divided or multiplied by `alpha`, down to the worker's `least` and up to its `most`,
    and rounded so that it changes. `first`: the sizes of the first batches.
    """

    first: tuple[int, ...]
    least: tuple[int, ...]
    most: tuple[int, ...]
    alpha: float = 2.0

    @classmethod
    def fixed(cls, sizes: Sequence[int]) -> Self:
        """Return the policy whose batches never change (algorithm 1, if all sizes are equal)."""
        return cls(tuple(sizes), tuple(sizes), tuple(sizes))

    def next_batch(self, worker: int, updates: Sequence[float], sizes: Sequence[int]) -> int:
        """Return the size of the batch that the worker gets now, at least 1.

        `updates` and `sizes` are those of all workers; a size is 0 before the first batch.
        """
        size, least, most = sizes[worker], self.least[worker], self.most[worker]
        if not size or least == most:
            return self.first[worker]
        others = [made for other, made in enumerate(updates) if other != worker]
        if others and updates[worker] < min(others):
            return max(floor(size / self.alpha), least)
        if others and updates[worker] > max(others):
            return min(ceil(size * self.alpha), most)
        return size


def proportional(speeds: Sequence[float], total: int) -> list[int]:
    """Return sizes of batches of `total` samples together, in proportion to the workers' speeds.

    So Omnivore splits a batch (Hadjis et al. 2016): all take equally long, if the speeds hold.
    Samples that rounding down leaves go where it took most. A worker gets at least one sample.
    """
    exact = [total * speed / sum(speeds) for speed in speeds]
    sizes = [floor(share) for share in exact]
    by_loss = sorted(range(len(exact)), key=lambda i: sizes[i] - exact[i])
    for i in by_loss[: total - sum(sizes)]:
        sizes[i] += 1
    return [max(1, size) for size in sizes]


def policy_of(
    config: Hogbatch, specs: Sequence[WorkerSpec], speeds: Sequence[float], batch_size: int
) -> Policy:
    """Return the policy of a configuration for these workers and a workload's batch size.

    `speeds` are the workers' samples/s with batches of the workload's size.
    """
    match config.policy:
        case "hogwild":
            return Policy.fixed([spec.threads for spec in specs])
        case "hogbatch":
            return Policy.fixed([batch_size] * len(specs))
        case "proportional":
            return Policy.fixed(proportional(speeds, batch_size * len(specs)))
    gpu_batch = config.gpu_batch or (max(1, batch_size // 64), batch_size)
    first, least, most = [], [], []
    for spec in specs:
        on_cores = spec.kind == DeviceKind.CPU
        small, large = (spec.threads * n for n in config.cpu_batch) if on_cores else gpu_batch
        first.append(small if on_cores else large)
        least.append(small)
        most.append(large)
    if config.policy == "cpu_gpu":
        return Policy.fixed(first)
    return Policy(tuple(first), tuple(least), tuple(most), config.alpha)


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
    left of an epoch that is resumed, ascending. Raises ValueError for ranges that are completed or
    given back without having been handed out, and for free ones that are none of the epoch's.
    """

    def __init__(self, num_samples: int, free: Sequence[range] | None = None) -> None:
        whole = [range(num_samples)] if num_samples else []
        self._free = whole if free is None else list(free)  # ascending, none adjacent
        ends = [end for part in self._free for end in (part.start, part.stop)]
        if ends != sorted(set(ends)) or (ends and not 0 <= ends[0] < ends[-1] <= num_samples):
            raise ValueError(f"{self._free} are no parts of {num_samples} samples")
        self._assigned: dict[int, range] = {}  # by the first place
        self.num_samples = num_samples

    def __len__(self) -> int:
        """Return the number of samples that can be handed out."""
        return sum(map(len, self._free))

    @property
    def free(self) -> tuple[range, ...]:
        """The samples that can be handed out, in ascending ranges."""
        return tuple(self._free)

    @property
    def num_done(self) -> int:
        """The samples that have been used."""
        return self.num_samples - len(self) - sum(map(len, self._assigned.values()))

    @property
    def is_done(self) -> bool:
        """True if all samples have been used."""
        return not self._free and not self._assigned

    def take(self, size: int) -> range:
        """Hand out at most `size` samples.

        They are fewer, or none, at the end, and fewer where samples came back between others.
        """
        if not self._free:
            return range(0)
        found = self._free[0]
        taken, rest = found[:size], found[size:]
        self._free[:1] = [rest] if rest else []
        self._assigned[taken.start] = taken
        return taken

    def complete(self, taken: range) -> None:
        """Record that samples have been used."""
        if self._assigned.get(taken.start) != taken:
            raise ValueError(f"samples {taken.start} to {taken.stop} are not handed out")
        del self._assigned[taken.start]

    def give_back(self, taken: range) -> None:
        """Take samples back that were not used."""
        self.complete(taken)
        free = self._free
        i = bisect_left(free, taken.start, key=lambda part: part.start)
        if i < len(free) and free[i].start == taken.stop:
            taken = range(taken.start, free.pop(i).stop)
        if i and free[i - 1].stop == taken.start:
            i -= 1
            taken = range(free.pop(i).start, taken.stop)
        free.insert(i, taken)
