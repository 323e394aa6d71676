"""The configuration of strategy local: how often workers meet, and what they exchange then."""

from math import log2
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import check_codec

_Codec = Annotated[str, AfterValidator(check_codec)]
_Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
# Of two workers, and by which it rises with twice as many: 0.6 for two and 0.8 for eight were the
# best of DiLoCo's scaling laws (arXiv 2503.09799).
_RATE_OF_TWO, _RATE_PER_DOUBLING = 0.6, 0.1


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Local:
    """Rounds of inner steps, and the exchange after each (DiLoCo, arXiv 2311.08105).

    In a round each of `workers` takes `sync_every` inner steps, or as many as fit into the time of
    the others. The model's layers are dealt into `fragments`, which take turns: in a round each is
    exchanged once (arXiv 2501.18512). While one travels, its worker takes `delay` further inner
    steps; then the worker's parameters become `mixing` times its own plus the rest of the group's.
    Outer gradients travel by `codec`. The outer optimizer is SGD with `outer_momentum`, Nesterov's;
    without `outer_learning_rate` it is 0.6 for two workers and 0.8 for eight.

    `hub` is the host that keeps the group's parameters, by default that of the first device; of a
    plan, not of a run, whose hub is where it is started.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    sync_every: Annotated[int, Field(ge=1, lt=2**31)] = 100
    fragments: Annotated[int, Field(ge=1)] = 1
    delay: Annotated[int, Field(ge=0)] = 0
    mixing: _Share = 0.0
    codec: _Codec | None = None
    outer_learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    outer_momentum: _Share = 0.9
    hub: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Local":
        if self.fragments > self.sync_every:
            raise ValueError(
                f"fragments: {self.fragments} are more than the {self.sync_every} steps of a round"
            )
        if self.delay * self.fragments >= self.sync_every and self.delay:
            most = (self.sync_every - 1) // self.fragments
            raise ValueError(
                f"delay: {self.delay} steps; a fragment must have come before the next is sent, "
                f"at most {most} with fragments={self.fragments} and sync_every={self.sync_every}"
            )
        return self

    @property
    def outer_rate(self) -> float:
        """The learning rate of the outer optimizer."""
        if self.outer_learning_rate is not None:
            return self.outer_learning_rate
        return _RATE_OF_TWO + _RATE_PER_DOUBLING * (log2(self.workers) - 1)

    def sent_after(self, fragment: int, num_steps: int) -> int:
        """Return the inner step of a round after which a fragment is sent, of `num_steps`."""
        return (fragment + 1) * num_steps // self.fragments

    def delay_of(self, num_steps: int) -> int:
        """Return the inner steps beside which a fragment travels, of a worker that takes so many.

        One that takes fewer steps in the time of the others takes fewer beside the exchange.
        """
        return self.delay * num_steps // self.sync_every
