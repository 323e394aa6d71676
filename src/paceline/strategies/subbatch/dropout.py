"""Dropout of which each rank has some rows and columns.

The mask of a dropout in a step is that which `nn.Dropout` draws for the whole step's batch, all
ranks' samples in rank order, and for all columns, on a CPU, right after
`torch.manual_seed(dropout_seed(seed, step, name))`. Each rank draws it whole, which is little
beside a linear layer, and takes its part: so the masks depend neither on the number of workers nor
on how a batch is cut into sub-batches, and one process with plain `nn.Dropout` has the same.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def dropout_seed(seed: int, step: int, name: str) -> int:
    """Return the seed of the mask of the dropout of that name in the model, in a step of the run.

    `seed` is that of the run; steps count from 0.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


class Masks:
    """The masks of one step, whose batch has `num_rows` samples over all ranks."""

    def __init__(self, seed: int, step: int, num_rows: int) -> None:
        self._seed, self._step, self._num_rows = seed, step, num_rows
        self._drawn: dict[str, Tensor] = {}

    def noise(
        self, name: str, p: float, width: int, rows: Sequence[int], first: int, like: Tensor
    ) -> Tensor:
        """Return what to multiply the values of these rows of the batch by: zeros, and 1/(1-p).

        `like` has as many rows, and the columns from `first` on of all `width`.
        """
        if name not in self._drawn:
            source = torch.Generator().manual_seed(dropout_seed(self._seed, self._step, name))
            kept = torch.empty(self._num_rows, width).bernoulli_(1 - p, generator=source)
            self._drawn[name] = kept.bool()
        own = self._drawn[name][list(rows), first : first + like.shape[1]]
        noise = own.to(like)
        return noise if p in (0, 1) else noise.div_(1 - p)
