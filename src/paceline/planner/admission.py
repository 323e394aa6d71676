"""Decide which workers to use, by comparing the throughput with and without each worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.balance import apportion
from paceline.core.plan import Kind, PriceKey
from paceline.planner.forecast import Forecast

_GAIN = 1.02  # minimum speed-up that justifies further workers


@dataclass(frozen=True)
class Admission:
    """The verdict about one worker, with the throughputs on which it is based.

    `samples_per_s`: throughput of the worker alone. `without_samples_per_s`: throughput of the
    other admitted workers. `equal_samples_per_s`: throughput of a group with this worker and equal
    batches. `balanced_samples_per_s`: throughput of that group with batches split by speed.
    `is_balanced`: the verdict is based on balanced batches. `helps`: the worker is admitted.
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
        """A sentence with the verdict and the throughputs."""
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
    """Decide for each worker whether to admit it; return the verdicts in rank order.

    Workers are admitted from the fastest to the slowest, until the remaining workers together would
    add less than 2 % of throughput.

    `speeds`: samples per second of each worker alone. `fixed_s`: seconds of each worker's step that
    do not depend on the number of samples. `exchange_s`: seconds that the exchange adds to
    a step of several workers. `most`: largest number of samples for each worker; None: no limit.

    Raises ValueError if there are no workers, a speed is not positive, `exchange_s` is negative, or
    the workers together cannot hold a batch.
    """
    if not speeds or min(speeds) <= 0 or exchange_s < 0:
        raise ValueError(
            "speeds must be positive, and exchange_s must not be negative "
            f"(got {list(speeds)} samples/s and {exchange_s} s)"
        )
    bounds = list(most) if most is not None else [None] * len(speeds)
    fixed = list(fixed_s) if fixed_s is not None else [0.0] * len(speeds)
    rate = _Group(speeds, bounds, fixed, batch_size, exchange_s).rate
    order = sorted(range(len(speeds)), key=lambda rank: -speeds[rank])
    rates = [rate(order[: number + 1], balanced) for number in range(len(order))]
    if not max(rates):
        raise ValueError(f"most must add up to at least {batch_size} samples (got {bounds})")
    number = next(i + 1 for i, one in enumerate(rates) if one * _GAIN >= max(rates))
    there, verdicts = order[:number], []
    for rank, speed in enumerate(speeds):
        # For a refused worker, report the best group that contains it and all faster workers.
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
        """Return the throughput of the given workers; 0 if they cannot hold a batch together."""
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
    """Decide for each device of a forecast whether to use it, with balanced batches.

    `durations`: measured seconds of each task in a step, if each device computes `samples` samples.
    The exchange time is the forecast step time minus the slowest device's task time.
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
