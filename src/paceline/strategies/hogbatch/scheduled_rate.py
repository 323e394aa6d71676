"""The factor by which a schedule changes the learning rate after a number of samples."""

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.errors import InvalidInput
from paceline.training.recipes.recipe import OptimizerFactory

_RATES = ("lr", "initial_lr")

Schedule = Callable[[Optimizer], LRScheduler | None]


class ScheduledRate:
    """Computes the factor by which a schedule changes the learning rate.

    The schedule makes one step per `batch_size` samples, even if workers use other batch sizes. The
    schedule controls an optimizer with one dummy parameter; all workers and parameter groups use
    the resulting factor. Raises InvalidInput if the schedule depends on a loss, or changes other
    fields than the learning rate, such as the momentum.
    """

    def __init__(self, make: OptimizerFactory, schedule: Schedule, batch_size: int) -> None:
        parameter = nn.Parameter(torch.zeros(2, 2))  # some optimizers accept only matrices
        optimizer = make([parameter])
        self._group = next(one for one in optimizer.param_groups if one["params"])
        self._rate, self._batch_size = float(self._group["lr"]), batch_size
        self._options = self._others()
        self._schedule = schedule(optimizer)
        self._step, self._factor = 0, 1.0
        if self._schedule is None:
            return
        if isinstance(self._schedule, ReduceLROnPlateau):
            raise InvalidInput("schedule", "cannot depend on a loss", got="ReduceLROnPlateau")
        if not self._rate:
            raise InvalidInput("schedule", "requires a learning rate above 0")
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # else the schedule would warn that it steps before the optimizer
        self._check()
        self._factor = float(self._group["lr"]) / self._rate

    def factor(self, num_samples: int) -> float:
        """Return the factor after a number of completed samples.

        The number may decrease when samples of a lost worker are assigned again; then the factor
        stays the same.
        """
        step = num_samples // self._batch_size
        if step > self._step:
            self._advance(step)
        return self._factor

    def _advance(self, step: int) -> None:
        if self._schedule is None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warning about step(epoch)
            while self._step < step:
                self._schedule.step()
                self._step += 1
                self._check()
        self._factor = float(self._group["lr"]) / self._rate

    def _others(self) -> dict[str, object]:
        return {key: one for key, one in self._group.items() if key not in ("params", *_RATES)}

    def _check(self) -> None:
        now = self._others()
        changed = [key for key, before in self._options.items() if now[key] != before]
        if changed:
            kind = type(self._schedule).__name__
            problem = f"must change only the learning rate, but {kind} changes {', '.join(changed)}"
            raise InvalidInput("schedule", problem, hint="for example, set cycle_momentum=False")
