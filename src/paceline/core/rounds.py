"""Plan rounds of local updates: when workers exchange which layers of a model.

A round has H inner steps (steps of a worker alone), as in DiLoCo (arXiv 2311.08105). Fragments
(groups of layers) are exchanged at different steps, as in Streaming DiLoCo (arXiv 2501.18512).
After an exchange, an outer step applies the workers' mean change.

    inner steps     1 2 3 ............ H/2 ............... H  1 2 ...
    fragment 0                         sent ..... loaded
    fragment 1                                            sent ..... loaded
                                       |- delay -|        |- delay -|
"""

from math import log2
from typing import Annotated, Literal, NamedTuple

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import AUTO, CodecName

_Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Outer = Literal["auto", "average", "nesterov"]


class OuterStep(NamedTuple):
    """An SGD step with Nesterov momentum on the workers' mean outer gradient.

    A rate of 1 without momentum (`AVERAGE`) sets the parameters to the workers' mean.
    """

    learning_rate: float
    momentum: float


AVERAGE = OuterStep(1.0, 0.0)
_OFTEN = 2  # averaging is better than momentum in rounds of at most this many inner steps
_FEW_ROUNDS, _OF_FEW = 100, OuterStep(0.9, 0.4)
_MANY_ROUNDS, _OF_MANY = 5000, OuterStep(0.6, 0.9)
# Increase of the outer learning rate when the number of workers doubles: the best rates in DiLoCo's
# scaling laws (arXiv 2503.09799) were 0.6 for two workers and 0.8 for eight.
_RATE_PER_DOUBLING = 0.1


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Rounds:
    """The exchanges of a round, and the outer step after each exchange.

    `sync_every`: a worker's mean number of inner steps in a round. `fragments`: number of groups of
    layers; each group is exchanged once per round, one group after another. `delay`: number of
    inner steps that a worker takes while a fragment is exchanged. `mixing`: after an exchange, a
    worker sets its parameters to `mixing` * own + (1 - `mixing`) * exchanged parameters. If
    `mixing` is None, the worker instead adds (exchanged - sent) parameters to its own, and so keeps
    the steps that it took during the exchange. `codec`: codec of outer gradients. `outer`:
    "average" or "nesterov"; "auto" chooses by the number of rounds. `outer_learning_rate` and
    `outer_momentum`: replace the values that `outer` selects.
    """

    sync_every: Annotated[int, Field(ge=1, lt=2**31)] = 100
    fragments: Annotated[int, Field(ge=1)] = 1
    delay: Annotated[int, Field(ge=0)] = 0
    mixing: _Share | None = None
    codec: CodecName | None = None
    outer: Outer = "auto"
    outer_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    outer_momentum: _Share | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Rounds":
        if self.codec == AUTO:
            raise ValueError("codec: cannot be auto for outer gradients")
        if self.fragments > self.sync_every:
            problem = f"must be at most sync_every={self.sync_every} (got {self.fragments})"
            raise ValueError(f"fragments: {problem}")
        if self.delay * self.fragments >= self.sync_every and self.delay:
            most = (self.sync_every - 1) // self.fragments
            limits = f"fragments={self.fragments} and sync_every={self.sync_every}"
            raise ValueError(f"delay: must be at most {most} with {limits} (got {self.delay})")
        return self

    def sent_after(self, fragment: int) -> int:
        """Return the inner step of a round after which a fragment is sent."""
        return (fragment + 1) * self.sync_every // self.fragments

    def outer_step(self, workers: int, sync_every: int, num_rounds: float | None) -> OuterStep:
        """Return the outer step for numbers of workers, inner steps per round, and rounds.

        `sync_every`: that of the first worker, because all workers take the same outer step.
        `num_rounds`: None if unknown.
        """
        meets_often = self.outer == "auto" and (workers == 1 or sync_every <= _OFTEN)
        if self.outer == "average" or meets_often:
            chosen = AVERAGE
        else:
            chosen = _nesterov(workers, num_rounds)
        rate, momentum = self.outer_learning_rate, self.outer_momentum
        return OuterStep(
            chosen.learning_rate if rate is None else rate,
            chosen.momentum if momentum is None else momentum,
        )


def _nesterov(workers: int, num_rounds: float | None) -> OuterStep:
    """Return the outer step with the momentum that fits a number of rounds.

    In benchmarks/local, low momentum was best for tens of rounds. DiLoCo's momentum was chosen for
    thousands of rounds; for tens of rounds it leads to a much higher loss.
    """
    doublings = log2(max(1.0, (num_rounds or 0.0) / _FEW_ROUNDS))
    share = min(1.0, doublings / log2(_MANY_ROUNDS / _FEW_ROUNDS))
    rate, momentum = (
        few + share * (many - few) for few, many in zip(_OF_FEW, _OF_MANY, strict=True)
    )
    return OuterStep(rate + _RATE_PER_DOUBLING * (log2(workers) - 1), momentum)
