"""Losses: what keeps real steps from the time that a plan of undisturbed tasks gives them.

A plan lets computing and exchanging go on side by side at their full speeds, and equal devices take
equal times. Neither is so. What it costs is said by a machine, contained in the times of a profile,
or taken from publications.
"""

from math import sqrt
from statistics import NormalDist
from typing import Annotated, Self

from pydantic import Field

from paceline.core.facts import Fact, Source

_Share = Annotated[float, Field(ge=0, lt=1)]
_NORMAL = NormalDist()
BUSY = 0.15  # unrest beyond which other programs run beside a profile, which then takes longer


def unrest_between(lower: float, middle: float, upper: float) -> float:
    """Return how far quartiles lie from their median, over that."""
    return (upper - lower) / (2 * middle) if middle else 0.0


class Losses(Fact):
    """The shares of time that a plan of undisturbed tasks does not know of.

    `beside_exchange`: by so much of the time for which a device exchanges beside its computation,
    that takes longer: collectives take its processors and its memory's bandwidth. `beside_copies`:
    the same of copies by a GPU's own engines, which take less; None: as much.
    `spread`: the standard deviation of a worker's computation of a step over its mean; workers that
    exchange in each step wait for the slowest. `unrest`: how far from their median the quartiles of
    a profile's steps lie, over that: what else ran meanwhile widens the range of predictions.
    """

    beside_exchange: _Share
    beside_copies: _Share | None = None
    spread: _Share
    unrest: Annotated[float, Field(ge=0)] = 0.0
    source: Source

    @classmethod
    def none(cls, source: str, unrest: float = 0.0) -> Self:
        """Return no losses: of a machine whose figures were measured with them."""
        return cls(beside_exchange=0.0, spread=0.0, unrest=unrest, source=source)

    def slowdown(
        self, hidden: float, num_workers: int, num_steps: int = 1, *, copied: float = 0.0
    ) -> float:
        """Return by how much longer computation takes than undisturbed.

        `hidden`: the exchange beside it, as a share of it, and `copied` that by a GPU's engines
        alone. Workers wait for each other after `num_steps` steps, whose spread is less by the root
        of their number.
        """
        waiting = self.spread / sqrt(num_steps) * largest_of(num_workers)
        by_copies = self.beside_exchange if self.beside_copies is None else self.beside_copies
        return 1 + self.beside_exchange * hidden + by_copies * copied + waiting


def largest_of(count: int) -> float:
    """Return the expected largest of so many normal numbers with mean 0 and deviation 1 (Blom)."""
    return _NORMAL.inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


_PUBLISHED = (
    "beside exchanges: "
    "kernels take 1.2 to 1.4 times as long (arXiv 2507.03114), buckets are copied and launched; "
    "spread: 8 % between equal GPUs of a cluster (arXiv 2208.11035); values within these that fit "
    "the published tables in benchmarks/scaling_tables; "
    "beside copies: 9.0 and 7.6 % on one H100, benchmarks/gpu"
)
# Of cores that compute and carry TCP's bytes: two hosts at 1 Gbit/s, 1.2 s more of processor time
# for 2.2 s of exchange in plain steps of AlexNet, and 0.3 s for 0.55 s with dynamic8.
CORES_BETWEEN_HOSTS = Losses(
    beside_exchange=0.55, spread=0.03, source="measured: processor time of steps, benchmarks/codecs"
)
# Of an exchange between hosts less is lost beside it: adapters and not kernels carry the bytes.
WITHIN_A_HOST = Losses(beside_exchange=0.85, beside_copies=0.09, spread=0.03, source=_PUBLISHED)
BETWEEN_HOSTS = Losses(beside_exchange=0.4, beside_copies=0.09, spread=0.03, source=_PUBLISHED)
