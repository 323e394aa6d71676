"""Let workers measure their links one after another, since links may share a wire."""

import time
from collections.abc import Callable

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import Message
from paceline.rpc.server import RpcRequest

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
        self._counts: dict[int, int] = {}
        self._held: list[RpcRequest] = []

    def reply(self, request: RpcRequest) -> Message | None:
        """Return the reply to a probe; None if the probe must wait.

        Raises InvalidInput for too many probes, or for too large a reply.
        """
        worker, nbytes = request.worker, request.message.step
        if self._worker not in (None, worker):
            self._held.append(request)
            return None
        if not 0 <= nbytes <= self._max_nbytes:
            raise InvalidInput("probe", f"must be 0 to {self._max_nbytes} bytes", got=nbytes)
        self._counts[worker] = self._counts.get(worker, 0) + 1
        if self._counts[worker] > _MOST:
            raise InvalidInput("probe", f"must be sent at most {_MOST} times by a worker")
        self._worker, self._asked_s = worker, self._clock()
        return Message("probe", parts=(memoryview(bytes(nbytes)),))

    def end(self, worker: int) -> list[RpcRequest]:
        """End a worker's turn; return the probes that waited for this turn to end.

        If it is not the worker's turn, nothing changes and the result is empty.
        """
        if self._worker != worker:
            return []
        self._worker = None
        held, self._held = self._held, []
        return held

    def forget(self, worker: int) -> list[RpcRequest]:
        """Remove a lost worker; return the probes that waited for its turn to end."""
        self._held = [one for one in self._held if one.worker != worker]
        self._counts.pop(worker, None)
        return self.end(worker)

    def overdue(self) -> int | None:
        """Return the probing worker if it sent no probe for `deadline_s`, otherwise None."""
        late = self._clock() - self._asked_s > self._deadline_s
        return self._worker if late else None
