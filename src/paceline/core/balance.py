"""Divide a batch among workers of different speed, from measured times."""

from collections.abc import Sequence
from fractions import Fraction
from math import sqrt


def apportion(
    num_samples: int, speeds: Sequence[float], most: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Divide samples among workers so that the slowest worker finishes as early as possible.

    `speeds`: proportional to samples per second. `most`: maximum part of each worker (None: no
    limit); ValueError if they are too small. The parts sum to `num_samples`. The method of D'Hondt
    rounds the proportional parts: that of the largest remainder could give a sample to a worker so
    slow that the others finish all samples earlier.
    """
    exact = [Fraction(speed) for speed in speeds]
    able = [
        min(num_samples if bound is None else bound, num_samples) if speed else 0
        for speed, bound in zip(exact, most or [None] * len(exact), strict=True)
    ]
    if sum(able) < num_samples:
        raise ValueError(f"most: must allow {num_samples} samples in all (got {able})")
    # Workers whose part would exceed their limit get the limit; the other workers share the rest.
    full: set[int] = set()
    while True:
        others = [rank for rank, speed in enumerate(exact) if speed and rank not in full]
        left = num_samples - sum(able[rank] for rank in full)
        total = sum((exact[rank] for rank in others), Fraction())
        over = {rank for rank in others if left * exact[rank] > able[rank] * total}
        if not over:
            break
        full |= over
    parts = [able[rank] if rank in full else 0 for rank in range(len(exact))]
    for rank in others:
        parts[rank] = int(left * exact[rank] / total)
    # Rounding down has left fewer samples than there are workers: assign them one by one.
    for _ in range(num_samples - sum(parts)):
        able_to = [rank for rank, part in enumerate(parts) if part < able[rank]]
        parts[min(able_to, key=lambda rank: (parts[rank] + 1) / exact[rank])] += 1
    return tuple(parts)


_FIRST_INTERVAL = 4
_LONGEST_INTERVAL = 64
_TOLERANCE = 0.05  # least gain for which shares change after the first interval
_LEAST_PART = 0.4  # smallest factor of the tolerance, for long intervals
_REGAINED = 0.99  # each round, an idle rank's assumed seconds per sample are multiplied by this


class Balance:
    """Searches for shares of a batch with which all ranks finish at the same time.

    Shares are equal at first; `most` limits each rank's share by its memory. Every `interval` steps
    `record` receives each rank's seconds per sample, and changes the shares only if the slowest
    rank would finish earlier by more than a tolerance, so that noise does not change batches. The
    tolerance shrinks as `interval` grows, because longer measurements have less noise. The shares
    need a few rounds to converge, because fixed costs make seconds per sample depend on the share.
    """

    def __init__(
        self, batch_size: int, num_ranks: int, most: Sequence[int | None] | None = None
    ) -> None:
        self._batch_size, self._most = batch_size, most
        self._seconds: list[float | None] = [None] * num_ranks
        self._excluded: set[int] = set()
        self.shares = apportion(batch_size, [1.0] * num_ranks, most)
        self.interval = _FIRST_INTERVAL

    @property
    def samples_per_s(self) -> tuple[float | None, ...]:
        """The estimated speed of each rank; None before a measurement."""
        return tuple(None if seconds is None else 1 / seconds for seconds in self._seconds)

    def record(self, seconds: Sequence[float | None]) -> tuple[int, ...]:
        """Record each rank's seconds per sample (None without samples), and return the shares.

        `interval`, the number of steps until the next call, grows while the shares do not change.
        """
        for rank, new in enumerate(seconds):
            old = self._seconds[rank]
            # Assume that a rank without samples gets faster, so that it is tried again.
            self._seconds[rank] = new if new is not None else old and _REGAINED * old
        return self._judge()

    def exclude(self, rank: int) -> tuple[int, ...]:
        """Exclude a rank from all further batches, and return the shares."""
        self._excluded.add(rank)
        return self._judge()

    def _judge(self) -> tuple[int, ...]:
        known = [seconds for seconds in self._seconds if seconds is not None]
        if not known:
            return self.shares
        # Assume that an unmeasured rank is the fastest, so that it is tried.
        believed = [min(known) if seconds is None else seconds for seconds in self._seconds]
        speeds = [
            0.0 if rank in self._excluded else 1 / seconds for rank, seconds in enumerate(believed)
        ]
        shares = apportion(self._batch_size, speeds, self._most)

        def slowest_s(split: Sequence[int]) -> float:
            return max(share * one for share, one in zip(split, believed, strict=True))

        must_go = any(self.shares[rank] for rank in self._excluded)
        tolerance = _TOLERANCE * max(_LEAST_PART, sqrt(_FIRST_INTERVAL / self.interval))
        if must_go or slowest_s(shares) < (1 - tolerance) * slowest_s(self.shares):
            self.shares, self.interval = shares, _FIRST_INTERVAL
        else:
            self.interval = min(2 * self.interval, _LONGEST_INTERVAL)
        return self.shares
