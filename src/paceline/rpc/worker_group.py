"""The workers of a hub: their processes, who is there, who takes too long, why each was lost."""

import logging
import time
from collections.abc import Callable, Iterator

from paceline.core.errors import printable
from paceline.rpc.frames import Message
from paceline.rpc.limits import MOST_TEXT, RateLimitedLog
from paceline.rpc.membership import Membership, Workers
from paceline.rpc.progress_deadline import ProgressDeadline
from paceline.rpc.server import Lost, RpcRequest, Server
from paceline.rpc.workers import WorkerPool, refusal

logger = logging.getLogger(__name__)
_DISMISSAL_S, _POLL_S = 2.0, 0.2
_LEAVING_S = 5.0  # for processes that are done to say good-bye
_MOST_LOST = 1000  # of reasons that are kept: a worker may come back and lie again


class WorkerGroup:
    """The workers that `rpc` connects, and those of them that the hub has started, in `pool`.

    `begun(worker, step)` returns the reply that lets a worker begin a step. Membership waits for
    `wait_s`; a worker may be silent for `deadline_s`, or much longer than usual.
    """

    def __init__(
        self,
        rpc: Server,
        workers: Workers,
        pool: WorkerPool | None,
        begun: Callable[[int, int], Message],
        *,
        wait_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rpc, self._workers, self._pool, self._begun = rpc, workers, pool, begun
        self.membership = Membership(workers, wait_s, self._admit, clock)
        self.deadline = ProgressDeadline(deadline_s, clock)
        self._begins: dict[int, RpcRequest] = {}  # without a reply, by worker
        self.lost: list[str] = []  # why each worker was lost
        self._diverged: set[int] = set()
        self._refusals = RateLimitedLog(logger)

    @property
    def is_own(self) -> bool:
        """True for workers of this machine alone, which tell no lies."""
        return self._pool is not None

    def wait(self, request: RpcRequest) -> None:
        """Have a worker wait until it may begin; the request is replied to then."""
        self._begins[request.worker] = request
        self.membership.wait(request.worker, request.message.step)

    def _admit(self, worker: int, step: int) -> None:
        self.reply(self._begins.pop(worker), self._begun(worker, step))

    def reply(self, request: RpcRequest, reply: Message) -> None:
        """Reply to a worker, whose turn it is then."""
        self._rpc.reply(request, reply)
        if request.worker in self._workers.live:
            self.deadline.replied(request.worker)

    def finish(self, worker: int) -> None:
        """Record that a worker has completed all its steps."""
        self.membership.finish(worker)
        self.deadline.forget(worker)

    def all_diverged(self, worker: int) -> bool:
        """Record that a worker's values are not finite; return True if that is so of all."""
        self._diverged.add(worker)
        return self._workers.live <= self._diverged

    def refused(self, worker: int, error: Exception) -> str:
        """Log that a worker's request was refused, now or later; return why it is dropped."""
        why = f"is refused: {printable(str(error), MOST_TEXT)}"
        self._refusals.warning(f"worker {worker} {why}")
        return why

    def drop(self, worker: int, why: str) -> bool:
        """Go on without a worker; return True if it was training."""
        self._begins.pop(worker, None)
        self.deadline.forget(worker)
        if not self.membership.drop(worker):
            return False
        if len(self.lost) < _MOST_LOST:
            self.lost.append(f"worker {worker} {why}")
        logger.info(
            "worker %d %s: its half-done step is dropped, and its share of the samples is left out "
            "until it is back",
            *(worker, why),
        )
        return True

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield workers to be dropped, and why: processes that failed, or that take too long.

        Admits those who wait when the caller has dropped them. Raises WorkerLost if no worker is
        left, or none was there for long.
        """
        for worker, why in self._pool.poll() if self._pool else ():
            self.membership.mark_dead(worker, why)
            yield worker, why
        if self.membership.has_begun:
            for worker, seconds in self.deadline.overdue().items():
                yield worker, f"is there, and has completed nothing for {seconds:.0f} s"
            self.membership.poll()
        self._refusals.flush()

    def dismiss(self, why: str, waiting: list[RpcRequest]) -> None:
        """Tell those who ask that the run is over, for a moment: they end with the reason."""
        until_s, left = time.monotonic() + _DISMISSAL_S, set(self._workers.live)
        for request in (*waiting, *self._begins.values()):
            self._rpc.reply(request, refusal(why))
        while left and time.monotonic() < until_s:
            event = self._rpc.receive(_POLL_S)
            if isinstance(event, RpcRequest):
                self._rpc.reply(event, refusal(why))
            if isinstance(event, RpcRequest | Lost):
                left.discard(event.worker)

    def close(self) -> None:
        """Disconnect, and let processes of this machine end."""
        self._rpc.close()
        if self._pool is not None:
            self._pool.close(_LEAVING_S)
