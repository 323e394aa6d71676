"""A worker of strategy local in whose copy of the group's parameters a bit changes, once.

    python local_corrupted.py EXCHANGE OPTIONS OF paceline worker

It stands for memory that fails, or a processor that rounds in another way.
"""

import sys
from collections.abc import Sequence

from torch import Tensor

from paceline.cli import main
from paceline.strategies.local import worker
from paceline.strategies.local.trainer import Trainer


class Corrupted(Trainer):
    """A replica that goes wrong in one exchange, counted from the beginning of its process."""

    num_left = 0

    def receive(self, fragment: int, parts: Sequence[tuple[int, Tensor]]) -> None:
        super().receive(fragment, parts)
        Corrupted.num_left -= 1
        if Corrupted.num_left == 0:
            self.exchanged.outer.values[fragment][0] += 1e-3


Corrupted.num_left = int(sys.argv.pop(1))
worker.Trainer = Corrupted
main()
