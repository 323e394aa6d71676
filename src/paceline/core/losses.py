"""Time losses: why real steps take longer than a plan of undisturbed tasks.

A plan assumes that computation and communication overlap at full speed, and that equal devices take
equal times. The real losses come from a machine file, a profile or publications.
"""

from math import sqrt
from statistics import NormalDist
from typing import Annotated, Self

from pydantic import Field

from paceline.core.facts import Fact, Source

_Share = Annotated[float, Field(ge=0, lt=1)]
_NORMAL = NormalDist()
# If the spread of step times (`unrest`) exceeds this, a profile measures more steps, because
# other programs probably run.
BUSY = 0.15


def unrest_between(lower: float, middle: float, upper: float) -> float:
    """Return half the distance between the quartiles, relative to the median."""
    return (upper - lower) / (2 * middle) if middle else 0.0


class Losses(Fact):
    """Relative time losses that a plan of undisturbed tasks ignores.

    `beside_exchange`: seconds by which computation becomes longer for each second of concurrent
    exchange, because collectives use processors and memory bandwidth. `beside_copies`: seconds
    by which computation becomes longer for each second of concurrent copies by a GPU's copy
    engines; None: equals `beside_exchange`. `spread`: standard deviation of a worker's computing
    time, relative to its mean; synchronous workers wait for the slowest worker. `unrest`: relative
    spread of a profile's step times (`unrest_between`), which widens the range of predictions.
    """

    beside_exchange: _Share
    beside_copies: _Share | None = None
    spread: _Share
    unrest: Annotated[float, Field(ge=0)] = 0.0
    source: Source

    @classmethod
    def none(cls, source: str, unrest: float = 0.0) -> Self:
        """Return zero losses, for a machine whose measured speeds already include its losses."""
        return cls(beside_exchange=0.0, spread=0.0, unrest=unrest, source=source)

    def slowdown(
        self, hidden: float, num_workers: int, num_steps: int = 1, *, copied: float = 0.0
    ) -> float:
        """Return the factor by which losses make computation longer.

        `hidden`: fraction of the computing time during which an exchange runs. `copied`: the same
        for copies by a GPU's copy engines, which `hidden` excludes. `num_steps`: number of steps
        between exchanges, over which the workers' computing times average.
        """
        waiting = self.spread / sqrt(num_steps) * largest_of(num_workers)
        by_copies = self.beside_exchange if self.beside_copies is None else self.beside_copies
        return 1 + self.beside_exchange * hidden + by_copies * copied + waiting


def largest_of(count: int) -> float:
    """Return the expected maximum of `count` standard normal numbers (Blom's approximation)."""
    return _NORMAL.inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


_PUBLISHED = (
    "beside exchanges: "
    "kernels take 1.2 to 1.4 times as long (arXiv 2507.03114), buckets are copied and launched; "
    "spread: 8 % between equal GPUs of a cluster (arXiv 2208.11035); values within these that fit "
    "the published tables in benchmarks/scaling_tables; "
    "beside copies: 9.0 and 7.6 % on one H100, benchmarks/gpu"
)
# CPU devices also process TCP traffic: about 0.55 s of processor time per second of exchange.
# Measured with AlexNet, two hosts and 1 Gbit/s: 1.2 s in 2.2 s; with dynamic8, 0.3 s in 0.55 s.
CORES_BETWEEN_HOSTS = Losses(
    beside_exchange=0.55, spread=0.03, source="measured: processor time of steps, benchmarks/codecs"
)
# Between hosts, network adapters transfer the bytes, so an exchange slows GPUs less than within a
# host, where the GPUs transfer them.
WITHIN_A_HOST = Losses(beside_exchange=0.85, beside_copies=0.09, spread=0.03, source=_PUBLISHED)
BETWEEN_HOSTS = Losses(beside_exchange=0.4, beside_copies=0.09, spread=0.03, source=_PUBLISHED)
