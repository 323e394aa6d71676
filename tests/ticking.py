"""A clock that stands still unless somebody works, and layers that work for known times."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Ticking:
    """Time passes only where a test adds to `now`, and by `mark_s` after each mark."""

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
        return self  # a copied model works by the same clock


class Sleeping(Ticking):
    """Stands in for the time module: each sleep takes `late_s` longer than asked for."""

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
    """A layer of one weight whose forward and backward pass take the given times."""

    def __init__(self, clock: Ticking, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._times = (clock, forward_s, backward_s)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Work.apply(x * self.weight, *self._times)
        return result
