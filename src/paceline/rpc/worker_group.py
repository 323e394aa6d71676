"""The workers of a hub: their processes, membership, deadlines and losses."""

import logging
import time
from collections.abc import Callable, Iterator

from paceline.core.errors import printable
from paceline.rpc.frames import Message
from paceline.rpc.limits import MOST_TEXT, RateLimitedLog
from paceline.rpc.membership import Membership, ProgressDeadline, Workers
from paceline.rpc.server import Lost, RpcRequest, Server
from paceline.rpc.workers import WorkerPool, refusal

logger = logging.getLogger(__name__)
_DISMISSAL_S, _POLL_S = 2.0, 0.2
_LEAVING_S = 5.0  # for finished processes to exit
_MOST_LOST = 1000  # most recorded losses, because a worker may return and fail repeatedly


class WorkerGroup:
    """The workers connected by `rpc`; `pool` has the processes that the hub itself started.

    `begun(worker, step)` returns the reply that lets a worker begin a step. `Membership` uses
    `wait_s`, and `ProgressDeadline` uses `deadline_s`.
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
        self._begins: dict[int, RpcRequest] = {}  # unanswered requests to begin, by worker
        self.lost: list[str] = []  # one reason per loss
        self._diverged: set[int] = set()
        self._refusals = RateLimitedLog(logger)

    @property
    def is_own(self) -> bool:
        """True if the hub started all workers itself, so that their values can be trusted."""
        return self._pool is not None

    def wait(self, request: RpcRequest) -> None:
        """Let a worker wait until it may begin; only then its request is answered."""
        self._begins[request.worker] = request
        self.membership.wait(request.worker, request.message.step)

    def _admit(self, worker: int, step: int) -> None:
        self.reply(self._begins.pop(worker), self._begun(worker, step))

    def reply(self, request: RpcRequest, reply: Message) -> None:
        """Reply to a worker, and start its deadline if it is training."""
        self._rpc.reply(request, reply)
        if request.worker in self._workers.live:
            self.deadline.replied(request.worker)

    def finish(self, worker: int) -> None:
        """Record that a worker has completed all its steps."""
        self.membership.finish(worker)
        self.deadline.forget(worker)

    def all_diverged(self, worker: int) -> bool:
        """Record that a worker has non-finite values.

        Returns True if every training worker has had non-finite values.
        """
        self._diverged.add(worker)
        return self._workers.live <= self._diverged

    def refused(self, worker: int, error: Exception) -> str:
        """Log a refused request; return the reason to drop the worker."""
        why = f"was refused: {printable(str(error), MOST_TEXT)}"
        self._refusals.warning(f"worker {worker} {why}")
        return why

    def drop(self, worker: int, why: str) -> None:
        """Continue without a worker."""
        self._begins.pop(worker, None)
        self.deadline.forget(worker)
        if not self.membership.drop(worker):
            return
        if len(self.lost) < _MOST_LOST:
            self.lost.append(f"worker {worker} {why}")
        logger.info(
            "worker %d %s: training continues without its step and its samples until it returns",
            *(worker, why),
        )

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield each failed or late worker, with the reason; the caller drops it.

        Afterwards, lets waiting workers begin. Raises WorkerLost if no worker is left, or if all
        workers are lost and no worker returns in time.
        """
        for worker, why in self._pool.poll() if self._pool else ():
            self.membership.mark_dead(worker, why)
            yield worker, why
        if self.membership.has_begun:
            for worker, seconds in self.deadline.overdue().items():
                yield worker, f"is connected, but has completed nothing for {seconds:.0f} s"
            self.membership.poll()
        self._refusals.flush()

    def dismiss(self, why: str, waiting: list[RpcRequest]) -> None:
        """Refuse the next request of every worker within two seconds, so that the workers end.

        `why`: the reason in the refusals. `waiting`: requests without a reply, refused first.
        """
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
        """Disconnect, and wait for the hub's own processes to end."""
        self._rpc.close()
        if self._pool is not None:
            self._pool.close(_LEAVING_S)
