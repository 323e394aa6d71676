"""Which samples each rank takes where ranks differ in speed: unequal parts of one global batch.

Pure Python and numpy; the indices are found without communication.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate

from paceline.core.apportion import apportion
from paceline.core.errors import InvalidInput
from paceline.data.sampler import check_place, shuffled

Place = tuple[int, int]  # how many epochs have been begun, and batches drawn of the last


class BalancedSampler:
    """The batches of one rank, as lists of sample indices; a `batch_sampler` for a DataLoader.

    `batch_size` is global: an epoch's permutation is cut into batches of that many samples, the
    last of which may be smaller, and each into one part for every rank. The parts are `shares`: at
    first equal, later what `update` says, which a DataParallel with `balance` does by itself. The
    samples of a step depend on the seed and the epoch alone, so an epoch uses every sample exactly
    once, however the shares are and change, and all ranks take the same number of steps. `most`
    bounds the samples of each rank in a step (None: no bound).

    A rank may get no samples in a step: its list is empty then, and `Collate` makes a batch of it.
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
        _check(num_samples, batch_size, rank, world_size, seed)
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world_size = rank, world_size
        self.seed, self.epoch = seed, 0
        self.most = _bounds(most, batch_size, world_size)
        equal = apportion(batch_size, [1.0] * world_size, self.most)
        self._changes: list[tuple[Place, tuple[int, ...]]] = [((0, 0), equal)]
        self.drawn: Place = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of the next iteration; must be called alike on every rank."""
        if epoch < 0:
            raise InvalidInput(f"the epoch must be 0 or more, not {epoch}")
        self.epoch = epoch

    @property
    def shares(self) -> tuple[int, ...]:
        """The samples of each rank in a whole batch, by the latest update."""
        return self._changes[-1][1]

    def update(self, shares: Sequence[int], first: Place | None = None) -> None:
        """Split batches so from the place `first` on; None: from the next that is drawn.

        All ranks must call it with the same arguments. DataLoaders with worker processes draw ahead
        of training, and not all alike: `first` must be at or after `drawn` of every rank, their
        maximum. InvalidInput if the shares do not add up to a batch or go beyond `most`.
        """
        if len(shares) != self.world_size or min(shares) < 0 or sum(shares) != self.batch_size:
            raise InvalidInput(
                f"shares: {list(shares)} are not {self.world_size} parts of a batch of "
                f"{self.batch_size}"
            )
        for rank, (share, bound) in enumerate(zip(shares, self.most, strict=True)):
            if bound is not None and share > bound:
                raise InvalidInput(f"shares: rank {rank} takes at most {bound}, not {share}")
        start: Place = self.drawn if first is None else (first[0], first[1])
        if start < self.drawn:
            raise InvalidInput(
                f"shares: the batch of epoch {start[0]}, step {start[1]} has been drawn already"
            )
        passed = sum(place <= self.drawn for place, _ in self._changes)
        self._changes = [
            *(change for change in self._changes[passed - 1 :] if change[0] < start),
            (start, tuple(shares)),
        ]

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        # Counted when it is first drawn from: a DataLoader may make iterators that it never uses.
        number = self.drawn[0] + 1
        self.drawn = (number, 0)
        order = shuffled(self.num_samples, self.seed, self.epoch)
        for step, size in enumerate(self.global_sizes):
            parts = self._parts((number, step), size)
            start = step * self.batch_size + sum(parts[: self.rank])
            if self.drawn[0] == number:  # no older iterator that somebody goes on with
                self.drawn = (number, step + 1)
            yield order[start : start + parts[self.rank]].tolist()

    def _parts(self, place: Place, size: int) -> tuple[int, ...]:
        oldest = self._changes[0][1]
        later = (shares for first, shares in reversed(self._changes) if first <= place)
        shares = next(later, oldest)
        return shares if size == self.batch_size else apportion(size, shares)

    @cached_property
    def global_sizes(self) -> tuple[int, ...]:
        """Samples of each step over all ranks, in step order; the same on every rank."""
        ends = accumulate([self.batch_size] * len(self))
        return tuple(min(self.batch_size, self.num_samples - end + self.batch_size) for end in ends)


def _bounds(
    most: Sequence[int | None] | None, batch_size: int, world_size: int
) -> tuple[int | None, ...]:
    if most is None:
        return (None,) * world_size
    if len(most) != world_size or any(bound is not None and bound < 0 for bound in most):
        raise InvalidInput(
            f"most: must be {world_size} numbers of samples or None, not {list(most)}"
        )
    if sum(batch_size if bound is None else bound for bound in most) < batch_size:
        raise InvalidInput(
            f"most: the ranks together take fewer samples than a batch of {batch_size} has"
        )
    return tuple(most)


def _check(num_samples: int, batch_size: int, rank: int, world_size: int, seed: int) -> None:
    if num_samples < 1:
        raise InvalidInput(f"the number of samples must be at least 1, not {num_samples}")
    check_place(batch_size, rank, world_size, seed)
