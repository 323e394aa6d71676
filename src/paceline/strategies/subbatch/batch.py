"""The batch of a step over all ranks, as it is cut into sub-batches of samples.

A row is a sample of a classifier, or a token of a language model, whose samples (B, T) have T rows
each:

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
    """Return the message with which a rank tells its targets: int64 (1, 2 + most).

    `targets` are (samples,) or (samples, tokens). All messages have the same length: the number of
    samples, that of rows, the targets, and zeros. Raises InvalidInput unless they are at most
    `most` class numbers, or -100 where a row asks for nothing.
    """
    rows = targets.flatten()
    if rows.dtype != torch.int64:
        raise InvalidInput(
            "data", f"targets of {rows.dtype}", hint="subbatch needs int64 class numbers"
        )
    if len(rows) > most:
        raise InvalidInput(
            "data",
            f"a rank has {len(rows)} rows of {len(targets)} samples, where by the first sample "
            f"{most} are the most",
            hint="pad all samples to one length",
        )
    known = rows[rows != IGNORED]
    if len(known) and not 0 <= int(known.min()) <= int(known.max()) < num_classes:
        raise InvalidInput(
            "data",
            f"class numbers from {int(known.min())} to {int(known.max())}, but the model has "
            f"{num_classes} outputs",
        )
    message = rows.new_zeros(1, 2 + most)
    message[0, 0], message[0, 1] = len(targets), len(rows)
    message[0, 2 : 2 + len(rows)] = rows
    return message


@dataclass(frozen=True)
class StepBatch:
    """The batch of a step over all ranks, cut into sub-batches.

    `targets` are those of all rows, in rank order. `rows[rank][number]` are the places in the batch
    of the rows that a rank gives to a sub-batch; of samples their numbers differ by one at the
    most. `num_counted` rows are not ignored.
    """

    targets: Tensor
    rows: tuple[tuple[Tensor, ...], ...]
    num_counted: int

    @classmethod
    def of(cls, messages: Tensor, num_sub_batches: int) -> Self:
        """Return the batch of all ranks' label messages: (ranks, 2 + most)."""
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
        """Rows over all ranks."""
        return len(self.targets)

    def sizes_of(self, number: int) -> tuple[int, ...]:
        """Return the number of rows that each rank gives to a sub-batch."""
        return tuple(len(parts[number]) for parts in self.rows)

    def rows_of(self, number: int) -> Tensor:
        """Return the places of a sub-batch's rows in the whole batch, in rank order."""
        return torch.cat([parts[number] for parts in self.rows])


def num_counted(targets: Tensor) -> int:
    """Return the number of rows that are not ignored."""
    return int((targets != IGNORED).sum())
