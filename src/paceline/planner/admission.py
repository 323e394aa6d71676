"""Decide which workers are worth having, by the predicted throughput with and without each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.balance import apportion
from paceline.core.plan import Kind, PriceKey
from paceline.planner.forecast import Forecast

_GAIN = 1.02  # minimum speed-up by a worker that is worth having


@dataclass(frozen=True)
class Admission:
    """Throughput of all workers with and without one of them.

    `samples_per_s`: speed of the worker alone. `equal_samples_per_s`, `balanced_samples_per_s`:
    throughput of all, if batches are split equally or by speed; `is_balanced` selects the one that
    decides. `helps`: whether the worker is worth having.
    """

    worker: int
    samples_per_s: float
    without_samples_per_s: float
    equal_samples_per_s: float
    balanced_samples_per_s: float
    is_balanced: bool
    helps: bool

    @property
    def why(self) -> str:
        """The verdict and its numbers, as a sentence."""
        rates = {"equal": self.equal_samples_per_s, "balanced": self.balanced_samples_per_s}
        way, other = ("balanced", "equal") if self.is_balanced else ("equal", "balanced")
        verdict = "would hardly make training faster"
        if self.helps:
            verdict = "makes training faster"
        elif rates[way] < self.without_samples_per_s:
            verdict = "would slow the others down"
        return (
            f"worker {self.worker} ({self.samples_per_s:.4g} samples/s) {verdict}: all reach "
            f"{rates[way]:.4g} samples/s with it in {way} batches ({rates[other]:.4g} in {other} "
            f"ones), and {self.without_samples_per_s:.4g} without it"
        )


def admit(
    speeds: Sequence[float],
    batch_size: int,
    exchange_s: float = 0.0,
    balanced: bool = True,
    most: Sequence[int | None] | None = None,
    fixed_s: Sequence[float] | None = None,
) -> tuple[Admission, ...]:
    """Judge each worker, in rank order.

    `speeds`: samples per second of each worker alone; `fixed_s`: seconds of its step that do not
    depend on samples; `exchange_s`: exposed exchange of a step of two or more workers; `most`:
    largest number of samples of each worker in a batch.
    Admits the fastest workers, until all others together would add less than 2 %. ValueError if
    there is no worker, a speed is not positive, or a batch does not fit into all of them.
    """
    if not speeds or min(speeds) <= 0 or exchange_s < 0:
        raise ValueError(f"speeds and exchange_s: {list(speeds)} samples/s, {exchange_s} s")
    bounds = list(most) if most is not None else [None] * len(speeds)
    fixed = list(fixed_s) if fixed_s is not None else [0.0] * len(speeds)
    rate = _Group(speeds, bounds, fixed, batch_size, exchange_s).rate
    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    rates = [rate(order[: number + 1], balanced) for number in range(len(order))]
    if not max(rates):
        raise ValueError(f"most: {bounds} samples are fewer than a batch of {batch_size}")
    number = next(i + 1 for i, one in enumerate(rates) if one * _GAIN >= max(rates))
    there, verdicts = order[:number], []
    for rank, speed in enumerate(speeds):
        # Judge a refused worker in the best group that includes all faster workers.
        least = max(number, order.index(rank) + 1)
        best = max(range(least, len(order) + 1), key=lambda n: rates[n - 1])
        together = there if rank in there else order[:best]
        without = rate([one for one in there if one != rank], balanced)
        equal, even = rate(together, False), rate(together, True)
        verdicts.append(Admission(rank, speed, without, equal, even, balanced, rank in there))
    return tuple(verdicts)


class _Group(NamedTuple):
    speeds: Sequence[float]
    bounds: Sequence[int | None]
    fixed_s: Sequence[float]
    batch_size: int
    exchange_s: float

    def rate(self, ranks: Sequence[int], is_balanced: bool) -> float:
        """Return the throughput of some workers; 0 if a batch does not fit into them."""
        fit = [self.bounds[rank] for rank in ranks]
        if sum(self.batch_size if bound is None else bound for bound in fit) < self.batch_size:
            return 0.0
        own = [self.speeds[rank] if is_balanced else 1.0 for rank in ranks]
        parts = zip(ranks, apportion(self.batch_size, own, fit), strict=True)
        slowest_s = max(part / self.speeds[rank] + self.fixed_s[rank] for rank, part in parts)
        return self.batch_size / (slowest_s + self.exchange_s * (len(ranks) > 1))


def admit_profiled(
    forecast: Forecast,
    durations: Mapping[PriceKey, float],
    samples: float,
    batch_size: int,
) -> tuple[Admission, ...]:
    """Judge each device of a forecast in balanced batches.

    `durations`: measured seconds of the parts of a step with `samples` on each device. The rest of
    the forecast's step is exchange.
    """
    own_s, fixed_s = (dict.fromkeys(forecast.devices, 0.0) for _ in range(2))
    for key, seconds in durations.items():
        if key.owner in own_s and key.kind in (Kind.FORWARD, Kind.BACKWARD):
            own_s[key.owner] += seconds
        elif key.owner in own_s and key.kind is Kind.STEP:
            fixed_s[key.owner] += seconds
    exchange_s = max(0.0, forecast.step_s - max(own_s[one] + fixed_s[one] for one in own_s))
    speeds = [samples / seconds for seconds in own_s.values()]
    return admit(speeds, batch_size, exchange_s, fixed_s=list(fixed_s.values()))
