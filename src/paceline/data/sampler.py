"""Which samples each worker takes in each step: an exact partition of every epoch.

Pure Python and numpy; the indices are found without communication.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidInput


def shuffled(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(num_samples) that depends on nothing but the arguments."""
    # numpy promises that SeedSequence and raw PCG64 output never change, but not that
    # Generator.permutation does not: machines with different numpy versions must agree.
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable").astype(np.int64)


class ShardedBatches:
    """The batches of one rank, as lists of sample indices; a `batch_sampler` for a DataLoader.

    `batch_size` is global: the most samples that a step takes over all workers. An epoch has
    ceil(num_samples / batch_size) steps. Its permutation is cut into that many steps, and each step
    into `world_size` parts; both cuts give sizes that differ by at most one. So an epoch uses every
    sample exactly once, every rank takes the same number of steps, and no rank gets an empty batch.
    The set of samples in a step depends on the seed and the epoch, but not on `world_size`.

    Parts of a step may differ in size by one. The average of the ranks' gradients is that of the
    whole step if each rank scales its mean loss by `local_size * world_size / global_sizes[step]`.

    Raises InvalidInput where a rank would get an empty batch, or an argument is out of range.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        _check(num_samples, batch_size, rank, world_size, seed)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; must be called alike on every rank."""
        if epoch < 0:
            raise InvalidInput(f"the epoch must be 0 or more, not {epoch}")
        self.epoch = epoch

    def __len__(self) -> int:
        return _num_steps(self.num_samples, self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = shuffled(self.num_samples, self.seed, self.epoch)
        for step, size in enumerate(self.global_sizes):
            start = _cut(self.num_samples, len(self), step)
            first = start + _cut(size, self.world_size, self.rank)
            last = start + _cut(size, self.world_size, self.rank + 1)
            yield order[first:last].tolist()

    @cached_property
    def global_sizes(self) -> tuple[int, ...]:
        """Samples of each step over all ranks, in step order; the same on every rank."""
        cuts = [_cut(self.num_samples, len(self), step) for step in range(len(self) + 1)]
        return tuple(last - first for first, last in pairwise(cuts))


def _num_steps(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)


def _cut(total: int, num_parts: int, part: int) -> int:
    """Where `part` begins if `total` is cut into `num_parts` of sizes that differ by at most 1."""
    return total * part // num_parts


def check_place(batch_size: int, rank: int, world_size: int, seed: int) -> None:
    """Raise InvalidInput for a batch, a rank or a seed that cannot be."""
    if batch_size < 1:
        raise InvalidInput(f"the batch size must be at least 1, not {batch_size}")
    if world_size < 1:
        raise InvalidInput(f"the number of workers must be at least 1, not {world_size}")
    if not 0 <= rank < world_size:
        raise InvalidInput(f"the rank must be from 0 to {world_size - 1}, not {rank}")
    if seed < 0:
        raise InvalidInput(f"the seed must be 0 or more, not {seed}")


def _check(num_samples: int, batch_size: int, rank: int, world_size: int, seed: int) -> None:
    check_place(batch_size, rank, world_size, seed)
    if batch_size < world_size:
        raise InvalidInput(
            f"a batch of {batch_size} cannot be shared by {world_size} workers: take a batch of "
            f"at least {world_size}, or at most {_count(batch_size, 'worker')}"
        )
    if num_samples < world_size:
        raise InvalidInput(
            f"{_count(num_samples, 'sample')} cannot be shared by {_count(world_size, 'worker')}: "
            "each worker needs at least one"
        )
    _check_smallest_step(num_samples, batch_size, world_size)


def _check_smallest_step(num_samples: int, batch_size: int, world_size: int) -> None:
    num_steps = _num_steps(num_samples, batch_size)
    smallest = num_samples // num_steps
    if smallest < world_size:
        enough = _num_steps(num_samples, num_samples // world_size)
        raise InvalidInput(
            f"{num_samples} samples in batches of {batch_size} make {num_steps} steps, the "
            f"smallest of {_count(smallest, 'sample')}, too few for {world_size} workers: "
            f"take a batch of at least {enough}, or at most {_count(smallest, 'worker')}"
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
