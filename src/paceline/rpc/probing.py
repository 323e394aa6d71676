"""Let workers measure their links one after another, since links may share a wire."""

import time
from collections import Counter
from collections.abc import Callable

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import Message

_MOST = 200  # most probes of one worker


class ProbeTurns:
    """Lets one worker probe its link at a time.

    The `step` of a probe is the number of bytes that its reply must have. A worker loses its turn
    if it sends no probe for `deadline_s`.
    """

    def __init__(
        self, max_nbytes: int, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_nbytes, self._deadline_s, self._clock = max_nbytes, deadline_s, clock
        self._worker: int | None = None
        self._asked_s = 0.0
        self._counts: Counter[int] = Counter()

    def reply(self, worker: int, probe: Message) -> Message | None:
        """Return the reply to a probe; None while another worker has its turn.

        Raises InvalidInput for too many probes, or for too large a reply.
        """
        if self._worker not in (None, worker):
            return None
        if not 0 <= probe.step <= self._max_nbytes:
            raise InvalidInput("probe", f"must be 0 to {self._max_nbytes} bytes", got=probe.step)
        self._counts[worker] += 1
        if self._counts[worker] > _MOST:
            raise InvalidInput("probe", f"must be sent at most {_MOST} times by a worker")
        self._worker, self._asked_s = worker, self._clock()
        return Message("probe", parts=(memoryview(bytes(probe.step)),))

    def end(self, worker: int) -> None:
        """End the turn of a worker, if it has the turn."""
        if self._worker == worker:
            self._worker = None

    def forget(self, worker: int) -> None:
        """Remove a lost worker."""
        self._counts.pop(worker, None)
        self.end(worker)

    def end_overdue(self) -> bool:
        """End the turn of a worker that has stopped probing; return whether there is one."""
        is_overdue = self._worker is not None and self._clock() - self._asked_s > self._deadline_s
        if is_overdue:
            self._worker = None
        return is_overdue
