"""Who is there: workers that wait for the beginning, that train, that are done, that are gone."""

import time
from collections.abc import Callable

from paceline.core.errors import InvalidInput, WorkerLost
from paceline.strategies.wheel.gathered import numbers_part
from paceline.strategies.wheel.half import difference
from paceline.strategies.wheel.job import Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Conduct
from paceline.wire.inbox import Request
from paceline.wire.messages import Message
from paceline.wire.texts import one_line

Reply = Callable[[Request, Message], None]


class Roll:
    """The workers of a run, as its hub knows them.

    Training begins when all are there, or those who are after `conduct.wait_s`; `begun` is called
    then. Who comes later begins at once.
    """

    def __init__(
        self,
        num_workers: int,
        layout: str,
        server: ParameterServer,
        reply: Reply,
        begun: Callable[[], None],
        conduct: Conduct,
    ) -> None:
        self._all, self._layout = set(range(num_workers)), layout
        self._server, self._reply, self._begun, self._conduct = server, reply, begun, conduct
        self._waiting: dict[int, Request] = {}  # for the answer to their BEGIN
        self._gone: set[int] = set()  # of this machine, and never to come back
        self._last_words = "all workers have ended"
        self._there_s = time.monotonic()  # when somebody was
        self._returning: set[int] = set()  # those who are to begin again
        self.has_begun = False
        self.live: set[int] = set()
        self.done: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether all that were there to the end are done."""
        return bool(self.done) and not (self.live or self._returning or self._waiting)

    @property
    def reached(self) -> int:
        """The number of steps that all have done who train, or are done."""
        there = self.live | self.done
        return min((self._server.next_step(worker) for worker in there), default=0)

    @property
    def waiting(self) -> list[Request]:
        """The requests to begin that have no reply yet."""
        return list(self._waiting.values())

    def begin(self, request: Request) -> None:
        """Have a worker begin, now or with the others; InvalidInput if it has another run."""
        parts = request.message.parts
        there = bytes(parts[0]).decode(errors="replace") if parts else ""
        found = difference(self._layout, there)
        if found is not None:
            raise InvalidInput(f"it has another run than the hub: {one_line(found)}")
        self._returning.discard(request.worker)
        self._waiting[request.worker] = request
        if self.has_begun and not self._returning:
            self._let_begin()

    def finish(self, worker: int) -> None:
        """Note that a worker has done all its steps."""
        self.live.discard(worker)
        self.done.add(worker)
        self._server.lost(worker)

    def lose(self, worker: int) -> bool:
        """Note that a worker is away; return whether it was training."""
        self._waiting.pop(worker, None)
        was_there = worker in self.live | self._returning
        self.live.discard(worker)
        self._returning.discard(worker)
        if was_there:
            self._server.lost(worker)
        return was_there

    def restart(self) -> None:
        """Have all that train begin again, together: what they have begun is void."""
        for worker in self.live:
            self._server.lost(worker)
        self._returning |= self.live
        self.live.clear()

    def strike(self, worker: int, why: str) -> None:
        """Note that a worker will never be back."""
        self._gone.add(worker)
        if worker not in self.done:
            self._last_words = f"worker {worker} {why}"

    def look(self) -> None:
        """Let the training begin if it is time. WorkerLost if there is nobody, or was too long."""
        expected, now_s = self._all - self._gone - self.done, time.monotonic()
        if not expected and not self.done:
            raise WorkerLost(f"{self._last_words}: no worker is left")
        is_late = now_s - self._there_s > self._conduct.wait_s
        if not self.has_begun:
            missing = expected - self._waiting.keys()
            if missing and not is_late:
                return
            if not self._waiting:
                raise WorkerLost(f"no worker has come within {self._conduct.wait_s:g} s")
            self._start(missing)
        elif self.live or self._returning or self._waiting:
            self._there_s = now_s
            if not self._returning:
                self._let_begin()
        elif is_late:
            raise WorkerLost(f"no worker is left, and none came back in {self._conduct.wait_s:g} s")

    def _start(self, missing: set[int]) -> None:
        if missing:
            self._conduct.say(f"training begins without workers {sorted(missing)}")
        self._begun()
        self.has_begun = True
        self._let_begin()

    def _let_begin(self) -> None:
        """Tell those who wait which step is their next.

        One that comes when others train does not make up for what they did while it was away.
        """
        others = [self._server.next_step(worker) for worker in self.live]
        for worker, request in sorted(self._waiting.items()):
            own, at = self._server.next_step(worker), request.message.step
            step = max(own, min(others, default=own))
            self._server.joined(worker)
            self.live.add(worker)
            if at > step:
                self._conduct.say(
                    f"worker {worker} was at step {at}, and this hub knows of {step} steps: "
                    f"{at - step} are done again"
                )
            elif step > own:
                self._conduct.say(f"worker {worker} goes on with the others, at step {step}")
            below = self._server.workers.of(worker).below
            parts = (numbers_part(below),) if below else ()
            self._reply(request, Message(Topic.BEGIN.value, step, parts=parts))
        self._waiting.clear()
