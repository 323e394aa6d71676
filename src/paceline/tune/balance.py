"""How many samples of each batch a rank takes: measured seconds in, the next shares out."""

from collections.abc import Sequence

from paceline.core.apportion import apportion

_FIRST_INTERVAL = 4
_LONGEST_INTERVAL = 64
_REGAINED = 0.99  # of the seconds that an idle rank is believed to need, each time


class Balance:
    """Looks for the shares of a batch with which all ranks are done at the same time.

    It begins with equal shares. `most` bounds each rank's: by its memory. After `interval` steps
    `record` takes what each rank needed for a sample, and changes the shares only if the slowest
    rank would be done earlier by more than the part `tolerance`: noise shuffles no batches. With
    fixed costs a rank's seconds per sample depend on its share, and so it takes a few rounds: in
    each the shares come nearer, from one side. A rank without samples shows no time: it is believed
    to get a little faster each time, and so is tried again one day.
    """

    def __init__(
        self,
        batch_size: int,
        num_ranks: int,
        most: Sequence[int | None] | None = None,
        tolerance: float = 0.05,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: must be 1 or more, not {num_ranks}")
        self._batch_size, self._tolerance = batch_size, tolerance
        self._most = [None] * num_ranks if most is None else list(most)
        self._seconds: list[float | None] = [None] * num_ranks
        self._excluded: set[int] = set()
        self.shares = apportion(batch_size, [1.0] * num_ranks, self._most)
        self.interval = _FIRST_INTERVAL

    @property
    def samples_per_s(self) -> tuple[float | None, ...]:
        """What each rank is believed to compute; None where nothing is known yet."""
        return tuple(None if seconds is None else 1 / seconds for seconds in self._seconds)

    def record(self, seconds: Sequence[float | None]) -> tuple[int, ...]:
        """Note what each rank took for one sample, None if it had none, and return the shares.

        `interval` says after how many steps to record again: it grows while nothing changes.
        """
        if any(one is not None and one <= 0 for one in seconds):
            raise ValueError(f"seconds: a sample takes more than none, not {list(seconds)}")
        for rank, new in enumerate(seconds):
            old = self._seconds[rank]
            self._seconds[rank] = new if new is not None else old and _REGAINED * old
        return self._judge()

    def exclude(self, rank: int) -> tuple[int, ...]:
        """Give a rank no samples any more, and return the shares."""
        self._excluded.add(rank)
        return self._judge()

    def _judge(self) -> tuple[int, ...]:
        known = [seconds for seconds in self._seconds if seconds is not None]
        if not known:
            return self.shares
        # One of which nothing is known is tried: as if it were the fastest.
        believed = [min(known) if seconds is None else seconds for seconds in self._seconds]
        speeds = [
            0.0 if rank in self._excluded else 1 / seconds for rank, seconds in enumerate(believed)
        ]
        shares = apportion(self._batch_size, speeds, self._most)
        now_s, then_s = (_longest(one, believed) for one in (self.shares, shares))
        must_go = any(self.shares[rank] for rank in self._excluded)
        if must_go or then_s < (1 - self._tolerance) * now_s:
            self.shares, self.interval = shares, _FIRST_INTERVAL
        else:
            self.interval = min(2 * self.interval, _LONGEST_INTERVAL)
        return self.shares


def _longest(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * one for share, one in zip(shares, seconds, strict=True))
