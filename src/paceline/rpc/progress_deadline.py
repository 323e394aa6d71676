"""Progress as a deadline: find workers that keep their connection alive and complete nothing."""

import time
from collections import defaultdict, deque
from collections.abc import Callable
from statistics import median

_KEPT = 32  # of the last times, whose median counts
_TIMES = 20.0  # as long as usual: then a worker is let go, but not before the deadline
_TIMES_AT_FIRST = 10.0  # the deadline, of a worker of which nothing is known yet


class ProgressDeadline:
    """Deadline of each worker's next request after a reply, from the usual times of workers.

    A request that waits for others is no fault of its worker. `deadline_s` is the least that each
    may take.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s, self._clock = deadline_s, clock
        self._since_s: dict[int, float] = {}
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def replied(self, worker: int) -> None:
        """Count from now: it is the worker's turn."""
        self._since_s[worker] = self._clock()

    def requested(self, worker: int) -> None:
        """End the worker's turn."""
        since_s = self._since_s.pop(worker, None)
        if since_s is not None:
            self._took_s[worker].append(self._clock() - since_s)

    def forget(self, worker: int) -> None:
        """Expect nothing of the worker."""
        self._since_s.pop(worker, None)

    def paused(self, seconds: float) -> None:
        """Leave out seconds in which nobody could be answered."""
        self._since_s = {worker: one + seconds for worker, one in self._since_s.items()}

    def overdue(self) -> dict[int, float]:
        """Return the workers that take too long, and for how many seconds by now."""
        now_s = self._clock()
        late = {worker: now_s - since_s for worker, since_s in self._since_s.items()}
        return {worker: one for worker, one in late.items() if one > self._allowed_s(worker)}

    def _allowed_s(self, worker: int) -> float:
        took = self._took_s[worker]
        if not took:
            return _TIMES_AT_FIRST * self._deadline_s
        return max(self._deadline_s, _TIMES * median(took))
