"""Cross-entropy of logits of which each rank has some columns, without gathering them.

Of each sample a rank tells three values: its largest logit m, the sum s of exp(logit - m) over its
own, and the target's logit t, which only one rank has (the others say 0). With all ranks' values

    M = max m,    S = sum of s exp(m - M),    loss = log S + M - sum of t

and the derivative by a rank's own logits is exp(logit - M) / S, less 1 at the target.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_VALUES = 3


@dataclass(frozen=True)
class Columns:
    """Which columns of the logits a rank has: `first` to `first + width - 1`."""

    first: int
    width: int

    def hot(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows whose target is one of these columns, and its place among them."""
        places = targets - self.first
        rows = ((places >= 0) & (places < self.width)).nonzero().flatten()
        return rows, places[rows]


def partial(logits: Tensor, targets: Tensor, columns: Columns) -> Tensor:
    """Return what a rank tells of its logits (N, width) and all targets (N,): (N, 3)."""
    largest = logits.amax(1)
    sums = (logits - largest.unsqueeze(1)).exp_().sum(1)
    of_target = torch.zeros_like(largest)
    rows, places = columns.hot(targets)
    of_target[rows] = logits[rows, places]
    return torch.stack((largest, sums, of_target), 1)


@dataclass(frozen=True)
class Loss:
    """The loss of each sample (N,), and what its derivatives need: M and log S of above."""

    losses: Tensor
    largest: Tensor
    log_sum: Tensor

    @classmethod
    def of(cls, told: Tensor) -> "Loss":
        """Return the loss, given what all ranks have told, in rank order: (ranks, N, 3)."""
        largest, sums, of_target = told.unbind(2)
        whole = largest.amax(0)
        log_sum = (sums * (largest - whole).exp()).sum(0).log()
        # In this order a small loss does not drown in large logits.
        return cls(log_sum + (whole - of_target.sum(0)), whole, log_sum)

    def gradients(self, logits: Tensor, targets: Tensor, columns: Columns, scale: float) -> Tensor:
        """Return the derivatives (N, width) of `scale` times the sum of the losses."""
        found = (logits - self.largest.unsqueeze(1)).sub_(self.log_sum.unsqueeze(1)).exp_()
        rows, places = columns.hot(targets)
        found[rows, places] -= 1
        return found.mul_(scale)
