"""A simulated clock, and layers whose passes advance it by known times."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Ticking:
    """A clock that tests advance through `now`; each mark also advances it by `mark_s`."""

    def __init__(self, mark_s: float = 0.0) -> None:
        self.now = 0.0
        self._mark_s = mark_s

    def mark(self) -> float:
        now = self.now
        self.now += self._mark_s
        return now

    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)

    def __deepcopy__(self, memo: Any) -> "Ticking":
        return self  # a copied model shares the clock


class Sleeping(Ticking):
    """Replaces the time module; each sleep takes `late_s` longer than requested."""

    late_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Ticking, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.now += forward_s
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.backward_s
        return gradient, None, None, None


class Timed(nn.Module):
    """A layer with one weight, whose forward and backward take the given times."""

    def __init__(self, clock: Ticking, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._times = (clock, forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Work.apply(x * self.weight, *self._times)
        return result
