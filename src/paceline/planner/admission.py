"""Admission of workers: the predicted throughput of all with a worker, and without."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.balance import apportion
from paceline.core.plan import Kind, PriceKey
from paceline.planner.forecast import Forecast

_GAIN = 1.02  # what a worker has to gain to be worth having


@dataclass(frozen=True)
class Admission:
    """The effect of a worker: samples a second of all with it and without.

    With it, batches are `equal_samples_per_s` if all workers get equal parts, and
    `balanced_samples_per_s` if the parts follow the workers' speeds; `is_balanced` says which of
    the two was asked about. `helps` says whether it is worth having.
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
        """One sentence, with the figures."""
        equal, balanced = self.equal_samples_per_s, self.balanced_samples_per_s
        own, other = (balanced, equal) if self.is_balanced else (equal, balanced)
        way, other_way = ("balanced", "equal") if self.is_balanced else ("equal", "balanced")
        if self.helps:
            verdict = "helps"
        elif own < self.without_samples_per_s:
            verdict = "would slow the others down"
        else:
            verdict = "would gain next to nothing"
        return (
            f"worker {self.worker}, which computes {self.samples_per_s:.4g} samples/s, {verdict}: "
            f"with it all reach {own:.4g} samples/s in {way} batches ({other:.4g} in {other_way} "
            f"ones), without it {self.without_samples_per_s:.4g}"
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

    `speeds` are samples a second of each worker by itself, beside the `fixed_s` of a step that do
    not depend on its samples. Two or more exchange gradients, which takes `exchange_s` of a step
    that nothing hides. `most` bounds the samples of each in a batch.
    Admitted are the fewest of the fastest workers that others would hardly make faster. ValueError
    if there is no worker, a speed is not positive, or a batch does not fit into all of them.
    """
    if not speeds or min(speeds) <= 0 or exchange_s < 0:
        raise ValueError(f"speeds and exchange_s: {list(speeds)} samples/s and {exchange_s} s")
    bounds = list(most) if most is not None else [None] * len(speeds)
    fixed = list(fixed_s) if fixed_s is not None else [0.0] * len(speeds)
    group = _Group(speeds, bounds, fixed, batch_size, exchange_s)
    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    rates = [group.rate(order[: number + 1], balanced) for number in range(len(order))]
    if not max(rates):
        raise ValueError(f"most: a batch of {batch_size} does not fit into all workers: {bounds}")
    number = next(i + 1 for i, one in enumerate(rates) if one * _GAIN >= max(rates))
    there, verdicts = order[:number], []
    for rank, speed in enumerate(speeds):
        # One that was not admitted comes with all that are faster than itself, or with all.
        least = max(number, order.index(rank) + 1)
        best = max(range(least, len(order) + 1), key=lambda n: rates[n - 1])
        together = there if rank in there else order[:best]
        without = group.rate([one for one in there if one != rank], balanced)
        equal, even = group.rate(together, False), group.rate(together, True)
        verdicts.append(Admission(rank, speed, without, equal, even, balanced, rank in there))
    return tuple(verdicts)


class _Group(NamedTuple):
    """All workers' speeds, bounds and fixed seconds; the batch, and the exchange of a step."""

    speeds: Sequence[float]
    bounds: Sequence[int | None]
    fixed_s: Sequence[float]
    batch_size: int
    exchange_s: float

    def rate(self, ranks: Sequence[int], is_balanced: bool) -> float:
        """Return the samples a second of these together; 0 if a batch does not fit into them."""
        own, fit = [self.speeds[rank] for rank in ranks], [self.bounds[rank] for rank in ranks]
        if sum(self.batch_size if bound is None else bound for bound in fit) < self.batch_size:
            return 0.0
        parts = apportion(self.batch_size, own if is_balanced else [1.0] * len(own), fit)
        # All wait for the slowest; one worker alone exchanges nothing.
        each = zip(ranks, parts, own, strict=True)
        slowest_s = max(part / speed + self.fixed_s[rank] for rank, part, speed in each)
        return self.batch_size / (slowest_s + self.exchange_s * (len(own) > 1))


def admit_profiled(
    forecast: Forecast,
    durations: Mapping[PriceKey, float],
    samples: float,
    batch_size: int,
) -> tuple[Admission, ...]:
    """Judge each device of a forecast in balanced batches.

    `durations` are the measured seconds of the parts of a step with `samples` on each device. What
    the forecast's step takes beyond the slowest device's own is the exchange's.
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
