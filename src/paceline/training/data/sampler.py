"""Divide each epoch's samples exactly among workers and steps, without communication."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paceline.core.balance import apportion
from paceline.core.errors import InvalidInput

TEST_SHARE = 5  # one in five samples is for testing


def shuffled(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a permutation of range(num_samples) that depends only on the arguments."""
    # Machines with different numpy versions must agree: numpy guarantees that SeedSequence and
    # raw PCG64 output never change, unlike Generator.permutation.
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    return np.argsort(bits.random_raw(num_samples), kind="stable").astype(np.int64)


class _Batches:
    """Base class of the samplers: checks their arguments, and stores the epoch and first step."""

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
        """Set the epoch of the next pass over the data, and the step at which the pass begins.

        The epoch determines the permutation. All ranks must pass the same arguments.
        """
        if epoch < 0:
            raise InvalidInput("epoch", "must be 0 or more", got=epoch)
        if not 0 <= first_step <= len(self):
            raise InvalidInput("first_step", f"must be from 0 to {len(self)}", got=first_step)
        self.epoch, self.first_step = epoch, first_step


class ShardedBatches(_Batches):
    """Yields one rank's batches as lists of sample indices; a `batch_sampler` for a DataLoader.

    `batch_size`: the maximum number of samples per step, all ranks together. The epoch's
    permutation is cut into ceil(num_samples / batch_size) steps, and each step is cut into
    `world_size` parts. The sizes of two steps differ by at most one, and so do the sizes of a
    step's parts. An epoch uses every sample exactly once, and a step's samples do not depend on
    `world_size`.

    Each rank should multiply its mean loss by `local_size * world_size / global_sizes[step]`, where
    `local_size` is the size of its batch. Then the average of the ranks' gradients is the gradient
    of the mean loss over all samples of the step.

    Raises InvalidInput if a rank would get an empty batch, or an argument is out of range.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        super().__init__(num_samples, batch_size, rank, world_size, seed)
        if num_samples < world_size:
            problem = f"must be at most {num_samples}, the number of samples"
            raise InvalidInput("workers", problem, got=world_size)
        least = -(-num_samples // (num_samples // world_size))
        if batch_size < least:
            problem = f"must be at least {least}, so that each worker has a sample in each step"
            hint = f"or use at most workers={num_samples // len(self)}"
            raise InvalidInput("batch_size", problem, got=batch_size, hint=hint)

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
        """The number of samples in each step, all ranks together; the same on every rank."""
        # Round the start of each step down, so that the sizes differ by at most one.
        cuts = [self.num_samples * step // len(self) for step in range(len(self) + 1)]
        return tuple(last - first for first, last in pairwise(cuts))

    def size_of(self, rank: int, step: int) -> int:
        """Return the number of a rank's samples in a step of an epoch."""
        size = self.global_sizes[step]
        return size * (rank + 1) // self.world_size - size * rank // self.world_size


Position = tuple[int, int]  # (number of epochs begun, number of batches drawn in this epoch)


class BalancedSampler(_Batches):
    """Yields one rank's batches as lists of sample indices; a `batch_sampler` for a DataLoader.

    An epoch's permutation is cut into batches of `batch_size` samples; the last batch may be
    smaller. Each batch is cut into one part per rank, with the sizes `shares`. The shares are equal
    at first; `paceline.DataParallel` with `balance="auto"` updates them. An epoch uses every sample
    exactly once, and all ranks have the same number of steps.

    `most`: upper limit of each rank's share, in samples; None means no limit. A rank may get an
    empty list of indices; `Collate` then returns an empty batch. Raises InvalidInput for an
    argument out of range.
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
            problem = f"must have one value for each of {world_size} ranks: 0 or more, or None"
            raise InvalidInput("most", problem, got=list(self.most))
        if sum(bounds) < batch_size:
            problem = f"must add up to at least {batch_size}, the batch size"
            raise InvalidInput("most", problem, got=list(self.most))
        equal = apportion(batch_size, [1.0] * world_size, self.most)
        self._changes: list[tuple[Position, tuple[int, ...]]] = [((0, 0), equal)]
        self.drawn: Position = (0, 0)

    @property
    def shares(self) -> tuple[int, ...]:
        """Each rank's number of samples in a full batch."""
        return self._changes[-1][1]

    def update(self, shares: Sequence[int], first: Position | None = None) -> None:
        """Set each rank's number of samples per batch, from position `first` on.

        A position is (number of epochs begun, number of batches drawn in this epoch). If `first` is
        None, the new shares apply to the next batch drawn. `first` must not be before the position
        that any rank has already reached (attribute `drawn`). This position may be ahead of
        training, because DataLoaders prefetch. All ranks must pass the same arguments. Raises
        InvalidInput if the shares do not add up to `batch_size`, or if a share exceeds `most`.
        """
        if len(shares) != self.world_size or min(shares) < 0 or sum(shares) != self.batch_size:
            problem = f"must be {self.world_size} numbers that add up to {self.batch_size}"
            raise InvalidInput("shares", problem, got=list(shares))
        for rank, (share, bound) in enumerate(zip(shares, self.most, strict=True)):
            if bound is not None and share > bound:
                problem = f"must be at most {bound} for rank {rank}"
                raise InvalidInput("shares", problem, got=share)
        start: Position = self.drawn if first is None else (first[0], first[1])
        if start < self.drawn:
            problem = f"must not be before {self.drawn}, the position that this rank has reached"
            raise InvalidInput("first", problem, got=start)
        # Forget old changes of the shares, except the last one up to `drawn`, which still applies.
        passed = sum(place <= self.drawn for place, _ in self._changes)
        self._changes = [
            *(change for change in self._changes[passed - 1 :] if change[0] < start),
            (start, tuple(shares)),
        ]

    def __iter__(self) -> Iterator[list[int]]:
        # Count the epoch at its first batch: a DataLoader may create iterators without using them.
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
        """The number of samples in each step, all ranks together; the same on every rank."""
        last = self.num_samples - (len(self) - 1) * self.batch_size
        return (self.batch_size,) * (len(self) - 1) + (last,)


def stratified_split(
    targets: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split sample indices into training and test sets, each in ascending order.

    Of each class, one fifth of the samples (rounded, at least one sample) is for testing. A class
    with only one sample is for training. Raises InvalidInput if no test samples result.
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
            "must have a class with two samples, so that one can be used for testing",
            hint="add samples or a test set",
        )
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
