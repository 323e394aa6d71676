"""A step's batch over all ranks: how many samples each has, which, and their labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput


def message(targets: Tensor, most: int, num_classes: int) -> Tensor:
    """Return what a rank tells the others of its labels (n,): int64 (1, 1 + most).

    InvalidInput unless they are at most `most` class numbers.
    """
    if targets.dtype != torch.int64 or targets.dim() != 1:
        raise InvalidInput(
            "data: samples with several labels cannot be trained on by subbatch; its loss is of "
            "one class a sample"
        )
    if len(targets) > most:
        raise InvalidInput(f"data: {len(targets)} samples of a rank, where {most} are the most")
    if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < num_classes:
        raise InvalidInput(
            f"data: class numbers from {int(targets.min())} to {int(targets.max())}, but the "
            f"model has {num_classes} outputs"
        )
    told = targets.new_zeros(1, 1 + most)
    told[0, 0] = len(targets)
    told[0, 1 : 1 + len(targets)] = targets
    return told


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step in `num_passes` sub-batches, to each of which all ranks give a part.

    `parts` are the samples that each rank gives to each pass; parts of a rank differ by one at the
    most, the larger ones first. `targets` are all labels, in rank order.
    """

    rank: int
    parts: tuple[tuple[int, ...], ...]
    targets: Tensor

    @classmethod
    def of(cls, told: Tensor, rank: int, num_passes: int) -> "StepBatch":
        """Return the batch of which all ranks have told (ranks, 1 + most)."""
        counts = [int(count) for count in told[:, 0].tolist()]
        parts = tuple(tuple(_parts(count, num_passes)) for count in counts)
        known = [row[1 : 1 + count] for row, count in zip(told, counts, strict=True)]
        return cls(rank, parts, torch.cat(known))

    @property
    def num_rows(self) -> int:
        """Samples over all ranks."""
        return len(self.targets)

    def sizes(self, number: int) -> tuple[int, ...]:
        """Return how many samples each rank gives to a pass."""
        return tuple(parts[number] for parts in self.parts)

    def own(self, number: int) -> slice:
        """Return which of this rank's samples it gives to a pass."""
        begin = sum(self.parts[self.rank][:number])
        return slice(begin, begin + self.parts[self.rank][number])

    def places(self, number: int) -> list[int]:
        """Return the places of a pass's samples among all, in rank order."""
        firsts = [0, *accumulate(map(sum, self.parts))]
        begins = [
            first + sum(parts[:number]) for first, parts in zip(firsts, self.parts, strict=False)
        ]
        return list(
            chain.from_iterable(
                range(begin, begin + size)
                for begin, size in zip(begins, self.sizes(number), strict=True)
            )
        )


def _parts(count: int, num_parts: int) -> Sequence[int]:
    whole, rest = divmod(count, num_parts)
    return [whole + (i < rest) for i in range(num_parts)]
