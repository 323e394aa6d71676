"""Let workers measure their links one after the other, as they may share a wire."""

import time
from collections.abc import Callable

from paceline.core.errors import InvalidInput
from paceline.rpc.frames import Message
from paceline.rpc.server import RpcRequest

_MOST = 200  # of one worker: small ones for the latency, some large ones


class ProbeTurns:
    """Let one worker probe at a time: a request's step is the number of bytes of its reply.

    A worker that has its turn and makes no use of it for `deadline_s` waits for the next.
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
        """Return the reply to a probe; None if it waits for its turn. InvalidInput for too many."""
        worker, nbytes = request.worker, request.message.step
        if self._worker not in (None, worker):
            self._held.append(request)
            return None
        if not 0 <= nbytes <= self._max_nbytes:
            raise InvalidInput("probe", f"{nbytes:,} bytes", hint=f"at most {self._max_nbytes:,}")
        self._counts[worker] = self._counts.get(worker, 0) + 1
        if self._counts[worker] > _MOST:
            raise InvalidInput("probe", f"more than {_MOST} of one worker")
        self._worker, self._asked_s = worker, self._clock()
        return Message("probe", parts=(memoryview(bytes(nbytes)),))

    def end(self, worker: int) -> list[RpcRequest]:
        """End a worker's turn if it has it; return the requests that waited for that."""
        if self._worker != worker:
            return []
        self._worker = None
        held, self._held = self._held, []
        return held

    def forget(self, worker: int) -> list[RpcRequest]:
        """End the probes of a worker that is gone; return the requests that waited for that."""
        self._held = [one for one in self._held if one.worker != worker]
        self._counts.pop(worker, None)
        return self.end(worker)

    def overdue(self) -> int | None:
        """Return the worker that has its turn, and has not asked for too long; or None."""
        late = self._clock() - self._asked_s > self._deadline_s
        return self._worker if late else None
