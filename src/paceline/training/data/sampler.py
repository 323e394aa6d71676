"""Samplers that partition every epoch exactly among workers and steps.

Pure Python and numpy; the indices need no communication.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.core.balance import apportion
from paceline.core.errors import InvalidInput

TEST_SHARE = 5  # one in so many samples is for testing


def shuffled(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(num_samples) determined by the arguments alone."""
    # numpy promises that SeedSequence and raw PCG64 output never change, but not that
    # Generator.permutation does not: machines with different numpy versions must agree.
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable").astype(np.int64)


class _Batches:
    """Arguments and epoch common to all samplers."""

    def __init__(
        self, num_samples: int, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        if batch_size < 1:
            raise InvalidInput("batch_size", "must be at least 1", got=batch_size)
        if world_size < 1:
            raise InvalidInput("workers", "must be at least 1", got=world_size)
        if not 0 <= rank < world_size:
            raise InvalidInput("rank", f"must be from 0 to {world_size - 1}", got=rank)
        if seed < 0:
            raise InvalidInput("seed", "must be 0 or more", got=seed)
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch, self.first_step = seed, 0, 0

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Choose the permutation of the next iteration; must be called alike on every rank.

        The iteration begins with the batch of `first_step`, to resume a run.
        """
        if epoch < 0:
            raise InvalidInput("epoch", "must be 0 or more", got=epoch)
        if not 0 <= first_step <= len(self):
            raise InvalidInput("first_step", f"must be from 0 to {len(self)}", got=first_step)
        self.epoch, self.first_step = epoch, first_step


class ShardedBatches(_Batches):
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
        super().__init__(num_samples, batch_size, rank, world_size, seed)
        if num_samples < world_size:
            raise InvalidInput(
                "workers",
                f"{_count(num_samples, 'sample')} cannot be shared by "
                f"{_count(world_size, 'worker')}: each worker needs at least one",
            )
        least = -(-num_samples // (num_samples // world_size))
        if batch_size < least:
            raise InvalidInput(
                "batch_size",
                f"must be at least {least}, or some of {_count(world_size, 'worker')} have no "
                "sample in a step",
                got=batch_size,
                hint=f"or take at most {_count(num_samples // len(self), 'worker')}",
            )

    def __iter__(self) -> Iterator[list[int]]:
        order = shuffled(self.num_samples, self.seed, self.epoch)
        start = sum(self.global_sizes[: self.first_step])
        for size in self.global_sizes[self.first_step :]:
            first, last = (
                start + size * rank // self.world_size for rank in (self.rank, self.rank + 1)
            )
            yield order[first:last].tolist()
            start += size

    @cached_property
    def global_sizes(self) -> tuple[int, ...]:
        """Samples of each step over all ranks, in step order; the same on every rank."""
        # Start of step k, rounded down, so that sizes differ by at most one.
        cuts = [self.num_samples * step // len(self) for step in range(len(self) + 1)]
        return tuple(last - first for first, last in pairwise(cuts))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


Position = tuple[int, int]  # number of epochs begun, and of batches drawn in the last one


class BalancedSampler(_Batches):
    """The batches of one rank, as lists of sample indices; a `batch_sampler` for a DataLoader.

    `batch_size` is global: an epoch's permutation is cut into batches of that size, the last of
    which may be smaller, and each batch into one part for every rank. The sizes of the parts are
    `shares`: equal at first, then as set by `update`, which a DataParallel with `balance` calls.
    The samples of a step depend only on the seed and epoch, so an epoch uses every sample exactly
    once for any shares, and all ranks take the same number of steps. `most`: largest share of each
    rank (None: no limit).

    A rank may get no samples in a step: its list is empty, and `Collate` makes an empty batch.
    Raises InvalidInput for an argument that is out of range.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        most: Sequence[int | None] | None = None,
    ) -> None:
        if num_samples < 1:
            raise InvalidInput("num_samples", "must be at least 1", got=num_samples)
        super().__init__(num_samples, batch_size, rank, world_size, seed)
        self.most: tuple[int | None, ...] = (None,) * world_size if most is None else tuple(most)
        bounds = [batch_size if bound is None else bound for bound in self.most]
        if len(bounds) != world_size or min(bounds) < 0:
            raise InvalidInput(
                "most", f"must be {world_size} numbers of samples or None, not {list(self.most)}"
            )
        if sum(bounds) < batch_size:
            raise InvalidInput(
                "most", f"the ranks together take fewer samples than a batch of {batch_size} has"
            )
        equal = apportion(batch_size, [1.0] * world_size, self.most)
        self._changes: list[tuple[Position, tuple[int, ...]]] = [((0, 0), equal)]
        self.drawn: Position = (0, 0)

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of samples of each rank in a full batch."""
        return self._changes[-1][1]

    def update(self, shares: Sequence[int], first: Position | None = None) -> None:
        """Change the shares from position `first` on; None: from the next batch drawn.

        All ranks must call this with the same arguments. DataLoaders with worker processes draw
        batches ahead, each by a different number: `first` must be at least the maximum of `drawn`
        over the ranks. Raises InvalidInput if shares do not add up to a batch or exceed `most`.
        """
        if len(shares) != self.world_size or min(shares) < 0 or sum(shares) != self.batch_size:
            raise InvalidInput(
                "shares",
                f"{list(shares)} are not {self.world_size} parts of a batch of {self.batch_size}",
            )
        for rank, (share, bound) in enumerate(zip(shares, self.most, strict=True)):
            if bound is not None and share > bound:
                raise InvalidInput("shares", f"rank {rank} takes at most {bound}", got=share)
        start: Position = self.drawn if first is None else (first[0], first[1])
        if start < self.drawn:
            raise InvalidInput(
                "shares", f"the batch of epoch {start[0]}, step {start[1]} has been drawn already"
            )
        # Of the changes before `drawn`, only the latest is needed.
        passed = sum(place <= self.drawn for place, _ in self._changes)
        self._changes = [
            *(change for change in self._changes[passed - 1 :] if change[0] < start),
            (start, tuple(shares)),
        ]

    def __iter__(self) -> Iterator[list[int]]:
        # Count an epoch at its first draw: a DataLoader may create iterators without using them.
        number = self.drawn[0] + 1
        self.drawn = (number, 0)
        order, first_step = shuffled(self.num_samples, self.seed, self.epoch), self.first_step
        for step, size in enumerate(self.global_sizes[first_step:], first_step):
            place = (number, step)
            changes = [shares for first, shares in self._changes if first <= place]
            shares = changes[-1] if changes else self._changes[0][1]
            parts = shares if size == self.batch_size else apportion(size, shares)
            start = step * self.batch_size + sum(parts[: self.rank])
            if self.drawn[0] == number:  # another iterator may have begun a later epoch
                self.drawn = (number, step + 1)
            yield order[start : start + parts[self.rank]].tolist()

    @cached_property
    def global_sizes(self) -> tuple[int, ...]:
        """Samples of each step over all ranks, in step order; the same on every rank."""
        last = self.num_samples - (len(self) - 1) * self.batch_size
        return (self.batch_size,) * (len(self) - 1) + (last,)


def stratified_split(
    targets: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split sample indices into training and test sets, each in ascending order.

    One fifth of each class (rounded, at least one of two or more) is for testing; a class with one
    sample is for training. Raises InvalidInput if no test samples result.
    """
    order = shuffled(len(targets), seed, epoch=0)
    is_test = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = order[targets[order] == label]
        if len(members) > 1:
            is_test[members[: max(1, round(len(members) / TEST_SHARE))]] = True
    if not is_test.any():
        raise InvalidInput(
            "data",
            "no class has two samples, so none can be set aside for testing",
            hint="add samples, or supply a test set",
        )
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
