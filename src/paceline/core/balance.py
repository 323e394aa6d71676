"""Divide a batch among workers of different speed, from measured times."""

from collections.abc import Sequence
from fractions import Fraction
from math import inf, sqrt


def apportion(
    num_samples: int, speeds: Sequence[float], most: Sequence[int | None] | None = None
) -> tuple[int, ...]:
    """Divide samples among workers so that the slowest worker finishes as early as possible.

    Returns each worker's number of samples. `speeds`: proportional to samples per second. `most`:
    the largest number for each worker; None: no limit. Raises ValueError if the limits allow fewer
    than `num_samples`. Numbers are rounded by the method of D'Hondt, because the method of the
    largest remainder could give a sample to a very slow worker, for which all others would wait.
    """
    exact = [Fraction(speed) for speed in speeds]
    able = [
        min(num_samples if bound is None else bound, num_samples) if speed else 0
        for speed, bound in zip(exact, most or [None] * len(exact), strict=True)
    ]
    if sum(able) < num_samples:
        raise ValueError(f"most: workers' limits must sum to at least {num_samples} (got {able})")
    # A worker whose share would exceed its limit gets the limit; the others divide the rest.
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
    # Rounding down has left over fewer samples than there are workers: assign them one by one.
    for _ in range(num_samples - sum(parts)):
        able_to = [rank for rank, part in enumerate(parts) if part < able[rank]]
        parts[min(able_to, key=lambda rank: (parts[rank] + 1) / exact[rank])] += 1
    return tuple(parts)


def evenly(count: int, num_parts: int) -> tuple[int, ...]:
    """Divide `count` into `num_parts` nearly equal parts, larger parts first."""
    whole, rest = divmod(count, num_parts)
    return tuple(whole + (i < rest) for i in range(num_parts))


_FIRST_INTERVAL = 4
_LONGEST_INTERVAL = 64
# Shares change only if this shortens a step by more than the tolerance, a fraction of its time. The
# tolerance is `_TOLERANCE` in a first interval, but only `_TOLERANCE` * `_LEAST_PART` in long ones.
_TOLERANCE = 0.05
_LEAST_PART = 0.4
# A rank's seconds per sample are averaged with the previous ones unless they differ by this factor.
# Without averages, shares can oscillate: a rank with more samples computes longer while other ranks
# already exchange gradients, and so seems slower than it is.
_SUDDEN = 1.5
# Each `record` multiplies the seconds per sample of a rank without samples by this factor.
_REGAINED = 0.99


class Balance:
    """Searches for shares of a batch with which all ranks finish at the same time.

    `shares`: each rank's number of samples, equal at first; the caller may set other numbers.
    `most`: the largest number that each rank's memory allows. Every `interval` steps the caller
    passes each rank's seconds per sample to `record`. `record` changes the shares only if a step
    would be shorter by more than a tolerance, so that noise does not change them.
    The tolerance shrinks as `interval` grows, because longer measurements have less noise. Shares
    need several calls to converge, because fixed costs make seconds per sample depend on the share.
    If shares are stable but a rank waits for the others, `record` tries a larger change for one
    interval, as if half of each rank's time were fixed, and undoes it if steps are not faster.
    """

    def __init__(
        self, batch_size: int, num_ranks: int, most: Sequence[int | None] | None = None
    ) -> None:
        self._batch_size, self._most = batch_size, most
        self._seconds: list[float | None] = [None] * num_ranks
        self._excluded: set[int] = set()
        self.shares = apportion(batch_size, [1.0] * num_ranks, most)
        self.interval = _FIRST_INTERVAL
        self._tried_from: tuple[tuple[int, ...], float] | None = None  # old shares, their seconds
        self._step_s = 0.0  # that of the last `record`
        # Once `interval` is at its maximum, each `record` counts `_until_trial` down; a trial can
        # start at 0. After a trial it starts again at `_pause`, which each trial doubles.
        self._until_trial, self._pause = 0, 1

    @property
    def samples_per_s(self) -> tuple[float | None, ...]:
        """The estimated samples per second of each rank; None before its first measurement."""
        return tuple(None if seconds is None else 1 / seconds for seconds in self._seconds)

    def record(self, seconds: Sequence[float | None], step_s: float = 0.0) -> tuple[int, ...]:
        """Record each rank's seconds per sample, and return the new shares.

        `seconds`: None for a rank without samples. `step_s`: the seconds of a step with its
        exchange and its waits, if known. Also sets `interval`, the number of steps until the next
        call, which doubles while the shares do not change.
        """
        self._step_s = step_s
        tried_from, self._tried_from = self._tried_from, None
        if tried_from is not None:
            old_shares, old_s = tried_from
            if _slowest_s(self.shares, seconds) > (1 - _TOLERANCE * _LEAST_PART) * old_s:
                self.shares, self.interval = old_shares, _FIRST_INTERVAL
                return self.shares
            pairs = zip(self._seconds, seconds, strict=True)
            self._seconds = [old if new is None else new for old, new in pairs]
        for rank, new in enumerate(seconds):
            old = self._seconds[rank]
            if new is None:  # assume that the rank becomes faster, so that it gets samples again
                self._seconds[rank] = old and _REGAINED * old
            elif old is None or not 1 / _SUDDEN < new / old < _SUDDEN:
                self._seconds[rank] = new
            else:
                self._seconds[rank] = (old + new) / 2
        return self._judge()

    def exclude(self, rank: int) -> tuple[int, ...]:
        """Give a rank no more samples, and return the new shares."""
        self._excluded.add(rank)
        return self._judge()

    def _judge(self) -> tuple[int, ...]:
        known = [seconds for seconds in self._seconds if seconds is not None]
        if not known:
            return self.shares
        # Assume that an unmeasured rank is as fast as the fastest, so that it gets samples.
        believed = [min(known) if seconds is None else seconds for seconds in self._seconds]
        speeds = [
            0.0 if rank in self._excluded else 1 / seconds for rank, seconds in enumerate(believed)
        ]
        shares = apportion(self._batch_size, speeds, self._most)
        slowest_s = _slowest_s(self.shares, believed)
        must_go = any(self.shares[rank] for rank in self._excluded)
        tolerance = _TOLERANCE * max(_LEAST_PART, sqrt(_FIRST_INTERVAL / self.interval))
        if must_go or self._shortens(_slowest_s(shares, believed), slowest_s, tolerance):
            self.shares, self.interval = shares, _FIRST_INTERVAL
            self._tried_from, self._until_trial, self._pause = None, 0, 1
        elif self.interval == _LONGEST_INTERVAL:
            self._try_more(speeds, believed, slowest_s)
        else:
            self.interval = min(2 * self.interval, _LONGEST_INTERVAL)
        return self.shares

    def _try_more(
        self, speeds: Sequence[float], seconds: Sequence[float], slowest_s: float
    ) -> None:
        """Set shares for a trial, if a trial is due and could shorten a step."""
        self._until_trial -= 1
        if self._until_trial > 0:
            return
        # If half of each rank's time is fixed, shares must change twice as much as in proportion.
        used = [speed if own else 0.0 for speed, own in zip(speeds, self.shares, strict=True)]
        ideal = [self._batch_size * speed / sum(used) for speed in used]
        pairs = zip(ideal, self.shares, strict=True)
        wanted = [max(one / 2, 2 * one - own) for one, own in pairs]
        shares = apportion(self._batch_size, wanted, self._most)
        # If half of a rank's time is fixed, its predicted time is that of (new + old) / 2 samples.
        halves = [(new + old) / 2 for new, old in zip(shares, self.shares, strict=True)]
        if self._shortens(_slowest_s(halves, seconds), slowest_s, _TOLERANCE * _LEAST_PART):
            self._tried_from = self.shares, slowest_s
            self.shares, self.interval = shares, _FIRST_INTERVAL
            self._pause *= 2
            self._until_trial = self._pause

    def _shortens(self, new_s: float, slowest_s: float, tolerance: float) -> bool:
        """Return whether a step gains more than the tolerance if its slowest rank takes `new_s`."""
        return slowest_s - new_s > tolerance * max(slowest_s, self._step_s)


def _slowest_s(shares: Sequence[float], seconds: Sequence[float | None]) -> float:
    """Return the longest computing time of a rank; infinite if a rank with samples has None."""
    own = [inf if one is None else one for one in seconds]
    return max(share * one for share, one in zip(shares, own, strict=True) if share)
