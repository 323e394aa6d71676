"""Cut the batch of a step over all ranks into sub-batches of samples.

For a classifier, a row is a sample. For a language model, a row is a token, so a sample has T rows.

    rank 0   [sample 0: T rows][sample 1: T rows] | [sample 2: T rows]      sub-batch 0 | 1
    rank 1   [sample 3: T rows]                   | [sample 4: T rows]
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.strategies.subbatch.loss import IGNORED


def label_message(targets: Tensor, most: int, num_classes: int) -> Tensor:
    """Return a rank's targets as a message: int64 of shape (1, 2 + most).

    `targets`: class numbers of shape (samples,) or (samples, tokens); -100 marks ignored rows.
    `most`: maximum number of rows per rank. The message consists of the number of samples, the
    number of rows, the targets, and zeros as padding.
    """
    rows = targets.flatten()
    if rows.dtype != torch.int64:
        raise InvalidInput("data", "must have int64 class numbers as targets", got=rows.dtype)
    if len(rows) > most:
        raise InvalidInput(
            "data",
            f"has {len(rows)} targets in {len(targets)} samples; the length of the first sample "
            f"allows at most {most}",
            hint="pad all samples to one length",
        )
    known = rows[rows != IGNORED]
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < num_classes:
        raise InvalidInput(
            "data",
            f"has classes {int(known.min())} to {int(known.max())}, but the model has "
            f"{num_classes} outputs",
        )
    message = rows.new_zeros(1, 2 + most)
    message[0, 0], message[0, 1] = len(targets), len(rows)
    message[0, 2 : 2 + len(rows)] = rows
    return message


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step over all ranks, cut into sub-batches.

    `targets`: the targets of all rows, in rank order. `rows[rank][number]`: the rows of a rank in
    sub-batch `number`, as indices in the batch. The numbers of a rank's samples in two sub-batches
    differ at most by one. `num_counted`: number of rows that are not ignored.
    """

    targets: Tensor
    rows: tuple[tuple[Tensor, ...], ...]
    num_counted: int

    @classmethod
    def of(cls, messages: Tensor, num_sub_batches: int) -> Self:
        """Build the batch from all ranks' label messages, of shape (ranks, 2 + most)."""
        counts: list[list[int]] = messages[:, :2].tolist()
        targets = torch.cat(
            [row[2 : 2 + own] for row, (_, own) in zip(messages, counts, strict=True)]
        )
        parts = torch.arange(len(targets)).split([own for _, own in counts])
        rows = []
        for places, (num_samples, own) in zip(parts, counts, strict=True):
            samples = places.view(num_samples, own // max(1, num_samples))
            rows.append(tuple(one.flatten() for one in samples.tensor_split(num_sub_batches)))
        return cls(targets, tuple(rows), num_counted(targets))

    @property
    def num_rows(self) -> int:
        """The number of rows over all ranks."""
        return len(self.targets)

    def sizes_of(self, number: int) -> tuple[int, ...]:
        """Return for each rank its number of rows in a sub-batch."""
        return tuple(len(parts[number]) for parts in self.rows)

    def rows_of(self, number: int) -> Tensor:
        """Return the rows of a sub-batch as indices in the batch, in rank order."""
        return torch.cat([parts[number] for parts in self.rows])


def num_counted(targets: Tensor) -> int:
    """Return the number of rows that are not ignored."""
    return int((targets != IGNORED).sum())
