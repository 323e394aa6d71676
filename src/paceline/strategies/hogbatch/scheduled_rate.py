"""The factor by which a schedule changes the learning rate after a number of samples."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import InvalidInput
from paceline.exchange.step import Optimize

_OWN_FIELDS = ("params", "lr", "initial_lr")  # fields that a schedule may change


class ScheduledRate:
    """Computes the factor by which a schedule changes the learning rate.

    The schedule makes one step per `batch_size` samples, even if workers use other batch sizes. The
    schedule controls an optimizer with one dummy parameter; all workers and parameter groups use
    the resulting factor. Raises InvalidInput if the schedule changes other fields than the learning
    rate, such as the momentum.
    """

    def __init__(
        self,
        optimizer: Optimize,
        schedule: Callable[[Optimizer], LRScheduler | None],
        batch_size: int,
    ) -> None:
        model = nn.ParameterList([torch.zeros(2, 2)])  # some optimizers accept only matrices
        made = optimizer(model)
        self._group = next(one for one in made.param_groups if one["params"])
        self._rate, self._batch_size = float(self._group["lr"]), batch_size
        self._step, self._others = 0, self._other_fields()
        self._schedule = schedule(made)
        if self._schedule is None:
            return
        if not self._rate:
            raise InvalidInput("schedule", "requires a learning rate above 0")
        model[0].grad = torch.zeros_like(model[0])
        made.step()  # else the schedule would warn that it steps before the optimizer
        self._check()

    def factor(self, num_samples: int) -> float:
        """Return the factor after a number of completed samples.

        The number may decrease when samples of a lost worker are assigned again; then the factor
        stays the same.
        """
        if self._schedule is None:
            return 1.0
        while self._step < num_samples // self._batch_size:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's warning about step(epoch)
                self._schedule.step()
            self._step += 1
            self._check()
        return float(self._group["lr"]) / self._rate

    def _other_fields(self) -> dict[str, object]:
        return {key: one for key, one in self._group.items() if key not in _OWN_FIELDS}

    def _check(self) -> None:
        now = self._other_fields()
        changed = [key for key, before in self._others.items() if now[key] != before]
        if changed:
            kind = type(self._schedule).__name__
            problem = f"must change only the learning rate, but {kind} changes {', '.join(changed)}"
            raise InvalidInput("schedule", problem, hint="for example, set cycle_momentum=False")
