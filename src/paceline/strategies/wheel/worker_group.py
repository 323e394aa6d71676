"""Track the state of a hub's workers: waiting, measuring links, training, late, lost or done."""

import json
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from statistics import median

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.rpc.frames import Message
from paceline.rpc.server import Lost, RpcRequest, Server
from paceline.rpc.workers import WorkerPool, refusal
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.staleness import Workers

logger = logging.getLogger(__name__)

_KEPT = 32  # durations kept per worker; each is the time from a reply to the worker's next request
_TIMES = 20.0  # a worker is late if a request takes longer than this multiple of its median time
_TIMES_AT_FIRST = 10.0  # a worker's first request may take this multiple of `deadline_s`
_DISMISSAL_S, _POLL_S = 2.0, 0.2
_MOST_PROBES = 200  # largest number of probes of a worker until it is lost
_MOST_LOST = 1000  # largest number of reasons in `lost`; a worker may be lost many times


class ProgressDeadline:
    """Limits the time from a reply to a worker until its next request.

    The limit is a multiple of the median of the worker's earlier times, but at least `deadline_s`.
    """

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s, self._clock = deadline_s, clock
        self._since_s: dict[int, float] = {}
        self._took_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def replied(self, worker: int) -> None:
        """Record that the hub has replied to a worker."""
        self._since_s[worker] = self._clock()

    def requested(self, worker: int) -> None:
        """Record that a worker's request has arrived."""
        since_s = self._since_s.pop(worker, None)
        if since_s is not None:
            self._took_s[worker].append(self._clock() - since_s)

    def forget(self, worker: int) -> None:
        """Expect no request from the worker."""
        self._since_s.pop(worker, None)

    def paused(self, seconds: float) -> None:
        """Exclude a pause of the hub from the times of all workers."""
        self._since_s = {worker: one + seconds for worker, one in self._since_s.items()}

    def overdue(self) -> dict[int, float]:
        """Return the seconds since the hub's last reply, for each late worker."""
        now_s = self._clock()
        late = {worker: now_s - since_s for worker, since_s in self._since_s.items()}
        return {worker: one for worker, one in late.items() if one > self._allowed_s(worker)}

    def _allowed_s(self, worker: int) -> float:
        took = self._took_s[worker]
        if not took:
            return _TIMES_AT_FIRST * self._deadline_s
        return max(self._deadline_s, _TIMES * median(took))


class ProbeTurns:
    """Lets one worker at a time measure its link to the hub, because links may share a cable.

    A probe is a request for a reply of a given size; its `step` is the number of bytes. Another
    worker may measure if the current worker sends no probe for `deadline_s`.
    """

    def __init__(
        self, max_nbytes: int, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_nbytes, self._deadline_s, self._clock = max_nbytes, deadline_s, clock
        self._worker: int | None = None
        self._asked_s = 0.0
        self._num_probes: Counter[int] = Counter()  # by worker

    def reply(self, worker: int, probe: Message) -> Message | None:
        """Return the reply to a probe; None while another worker measures its link.

        Raises InvalidInput for too many probes, or for too large a reply.
        """
        now_s = self._clock()
        if self._worker not in (None, worker) and now_s - self._asked_s <= self._deadline_s:
            return None
        if not 0 <= probe.step <= self._max_nbytes:
            problem = f"must ask for 0 to {self._max_nbytes} bytes"
            raise InvalidInput("probe", problem, got=probe.step)
        self._num_probes[worker] += 1
        if self._num_probes[worker] > _MOST_PROBES:
            raise InvalidInput("probe", f"must be sent at most {_MOST_PROBES} times by a worker")
        self._worker, self._asked_s = worker, now_s
        return Message("probe", parts=(memoryview(bytes(probe.step)),))

    def end(self, worker: int) -> None:
        """End the worker's link measurement, if any, so that another worker may measure."""
        if self._worker == worker:
            self._worker = None

    def forget(self, worker: int) -> None:
        """End a lost worker's measurement, and forget its number of probes."""
        self.end(worker)
        del self._num_probes[worker]


class WorkerGroup:
    """The workers of a run; `pool`: the worker processes that the hub has started, if any.

    Training begins when all workers have joined, or after `wait_s` without the missing workers.
    Workers that join later begin at once.
    """

    def __init__(
        self,
        rpc: Server,
        workers: Workers,
        pool: WorkerPool | None,
        *,
        wait_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rpc, self._workers, self._pool = rpc, workers, pool
        self._wait_s, self._clock = wait_s, clock
        self.deadline = ProgressDeadline(deadline_s, clock)
        self._expected = set(range(len(workers.all)))
        self.waiting: dict[int, RpcRequest] = {}  # unanswered BEGIN requests, by worker
        self._returning: set[int] = set()  # workers that must repeat a step and send BEGIN
        self._last_end = "all workers have ended"
        self._present_s = self._clock()  # the last time a worker was present
        self.has_begun = False
        self.lost: list[str] = []  # a reason for each time that a worker was lost

    @property
    def _is_any_present(self) -> bool:
        return bool(self._workers.live or self._returning or self.waiting)

    @property
    def _is_late(self) -> bool:
        return self._clock() - self._present_s > self._wait_s

    @property
    def _missing(self) -> set[int]:
        return self._expected - self._workers.done - self.waiting.keys()

    @property
    def is_over(self) -> bool:
        """True once some worker is done and no worker trains, returns or waits."""
        return bool(self._workers.done) and not self._is_any_present

    @property
    def is_ready(self) -> bool:
        """True if training can begin; WorkerLost if no worker joined in time, or all have ended."""
        self._check_any_is_left()
        if self._missing and not self._is_late:
            return False
        if not self.waiting:
            raise WorkerLost(f"no worker has joined within {self._wait_s:g} s")
        return True

    def begin(self) -> None:
        """Begin training with the workers that wait."""
        if self._missing:
            logger.info("training begins without workers %s", sorted(self._missing))
        self.has_begun, self._present_s = True, self._clock()
        self._admit_waiting()

    def wait(self, request: RpcRequest) -> None:
        """Keep a worker's BEGIN request unanswered until the worker may begin."""
        self._returning.discard(request.worker)
        self.waiting[request.worker] = request
        if self.has_begun and not self._returning:
            self._admit_waiting()

    def finish(self, worker: int) -> None:
        """Record that a worker has completed all its steps."""
        self._workers.drop(worker)
        self._workers.of(worker).is_done = True

    def restart(self) -> None:
        """Make all training workers repeat their current step, beginning together."""
        self._returning |= self._workers.live
        for worker in self._workers.live:
            self._workers.drop(worker)

    def reply(self, request: RpcRequest, reply: Message) -> None:
        """Reply to a worker; if the worker is training, start the deadline of its next request."""
        self._rpc.reply(request, reply)
        if request.worker in self._workers.live:
            self.deadline.replied(request.worker)

    def drop(self, worker: int, why: str) -> None:
        """Continue training without a worker, and log the reason, `why`."""
        self.deadline.forget(worker)
        self.waiting.pop(worker, None)
        was_training = worker in self._workers.live | self._returning
        self._returning.discard(worker)
        self._workers.drop(worker)
        if not was_training:
            return
        if len(self.lost) < _MOST_LOST:
            self.lost.append(f"worker {worker} {why}")
        logger.info(
            "worker %d %s; training continues without its samples until the worker returns",
            *(worker, why),
        )

    def poll(self) -> Iterator[tuple[int, str]]:
        """Yield the number of each failed or late worker, and why; then let waiting workers begin.

        The caller drops these workers. Raises WorkerLost if all workers have ended, or if all are
        lost and none has returned in time.
        """
        for worker, why in self._pool.poll() if self._pool else ():
            self._expected.discard(worker)
            if worker not in self._workers.done:
                self._last_end = f"worker {worker} {why}"
            yield worker, why
        if self.has_begun:
            for worker, seconds in self.deadline.overdue().items():
                yield worker, f"is connected, but has completed nothing for {seconds:.0f} s"
            self._check_any_is_left()
            if self._is_any_present:
                self._present_s = self._clock()
                if not self._returning:
                    self._admit_waiting()
            elif self._is_late:
                problem = f"all workers are lost, and no worker returned within {self._wait_s:g} s"
                raise WorkerLost(problem)

    def dismiss(self, why: str, waiting: list[RpcRequest]) -> None:
        """Refuse `waiting` requests and the next request of each worker, so that workers exit."""
        until_s, left = time.monotonic() + _DISMISSAL_S, set(self._workers.live)
        for request in (*waiting, *self.waiting.values()):
            self._rpc.reply(request, refusal(why))
        while left and time.monotonic() < until_s:
            event = self._rpc.receive(_POLL_S)
            if isinstance(event, RpcRequest):
                self._rpc.reply(event, refusal(why))
            if isinstance(event, RpcRequest | Lost):
                left.discard(event.worker)

    def _check_any_is_left(self) -> None:
        if not self._expected - self._workers.done and not self._workers.done:
            raise WorkerLost(f"{self._last_end}: no worker is left")

    def _admit_waiting(self) -> None:
        """Let all waiting workers begin, each at its next step."""
        next_steps = self._workers.next_steps
        others = [next_steps[worker] for worker in self._workers.live]
        for worker, request in sorted(self.waiting.items()):
            own, at = next_steps[worker], request.message.step
            # A returning worker skips steps that all training workers have completed: repeating
            # these steps would delay everyone.
            step = max(own, min(others, default=own))
            self._workers.add(worker, step)
            if at > step:
                text = "worker %d was at step %d, the hub at step %d; the worker repeats %d steps"
                logger.info(text, worker, at, step, at - step)
            elif step > own:
                logger.info("worker %d continues with the others, at step %d", worker, step)
            below = self._workers.of(worker).below
            parts = (json.dumps(below).encode(),) if below else ()
            self.reply(request, Message(Topic.BEGIN, step, parts=parts))
        self.waiting.clear()
