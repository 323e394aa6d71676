"""The hub: it relays the parts of each exchange, and keeps the group's parameters.

It waits for workers, deals out the units of each round, and replies to an exchange when the parts
of all workers are there. Each of them, and the hub, takes the outer step by itself. Workers that
are lost, late, or not like the others are left out, and the rest goes on; one that comes back takes
the group's parameters, and never gives its own.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from math import inf

from paceline.core.errors import Interrupted, InvalidInput, WorkerLost
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.links.interruption import Interruption
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_hub_keys
from paceline.rpc.limits import Limits, RateLimitedLog, one_line
from paceline.rpc.probing import ProbeTurns
from paceline.rpc.server import Joined, Lost, RpcRequest, Server
from paceline.rpc.workers import AGAIN, WorkerPool, agreement, difference, refusal
from paceline.strategies.local.checkpoints import Checkpoints
from paceline.strategies.local.gate import LeftOut, NotFinite
from paceline.strategies.local.log import Diverged, RunLog
from paceline.strategies.local.measure import DeviceProfile
from paceline.strategies.local.protocol import RunSpec, Topic, decode
from paceline.strategies.local.relay import Relay, Reply
from paceline.strategies.local.rounds import OutOfTurn
from paceline.strategies.local.trace import Trace

logger = logging.getLogger(__name__)
_LOOPBACK = "tcp://127.0.0.1:0"
_POLL_S = 0.2
_DISMISSAL_S = 2.0
_LEAVING_S = 5.0  # for processes that are done to say good-bye
_LATE = 3.0  # times as long as its steps of the round should take: then a worker is late
_MOST_UNEVEN = 100.0  # times as slow as the slowest of the others
_TIMES = 10.0  # the deadline, for work that is not measured, such as saving
_MOST_LOST = 1000  # of reasons that are kept: a worker may come back and lie again
_LATE_IF_UNKNOWN = 10.0  # times as long as they would take the slowest of those that are known
_MODULE = "paceline.strategies.local.worker"


class Hub:
    """Serves workers until all units of the run are trained on.

    It listens for them, and starts those of `devices` on this machine if `settings` have no address
    to bind. What was opened and started is closed by `stack`. Without all workers at the beginning,
    or any later, it waits for `settings.wait_s`.
    """

    def __init__(
        self,
        stack: ExitStack,
        settings: TrainSettings | RehearseSettings,
        run_id: str,
        spec: RunSpec,
        layout: str,
        relay: Callable[[Reply], Relay],
        log: RunLog,
        checkpoints: Checkpoints,
        devices: tuple[str, ...],
        threads: int,
        max_message_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._spec, self._layout, self._clock = settings, spec, layout, clock
        self._log, self._checkpoints = log, checkpoints
        limits = Limits(
            run_id,
            agreement(),
            num_workers=spec.config.workers,
            max_message_nbytes=max_message_nbytes,
            settings=spec.model_dump_json().encode(),
            silence_timeout_s=settings.deadline_s,
        )
        keys = None if settings.keys is None else load_hub_keys(settings.keys)
        self.rpc = Server(settings.bind or _LOOPBACK, limits, keys=keys, clock=clock)
        stack.callback(self.rpc.close)
        self.relay = relay(self.rpc.reply)
        self.rounds = self.relay.rounds
        self._pool: WorkerPool | None = None
        if settings.bind is None:
            own = _own_workers(devices, threads, self.rpc.address, run_id, settings.deadline_s)
            self._pool = WorkerPool(_MODULE, own, restarts=True)
            stack.callback(self._pool.close)
        else:
            logger.info(
                "listening on %s; waiting for %d workers", self.rpc.address, spec.config.workers
            )
        self._waiting: dict[int, RpcRequest] = {}  # with BEGIN
        self._returning: set[int] = set()  # told to begin again
        self._done: set[int] = set()
        self._has_begun = False
        self._first_exchange = self.rounds.exchange
        self._not_finite: set[tuple[int, int]] = set()  # workers, and in which exchange
        self._seen_s = self._clock()  # when somebody was there
        self._probes = ProbeTurns(max_message_nbytes, settings.deadline_s, clock)
        self._turns_s: dict[int, float] = {}  # since when it is each member's turn
        self._refusals = RateLimitedLog(logger)
        self._polled_s = 0.0
        self._failure: InvalidInput | WorkerLost | None = None
        self._last_words = "no worker has come"
        self._reasons: dict[int, str] = {}  # what workers told before they ended
        self._stops = False  # the state that is being saved is the last one
        self.interruption = Interruption()
        self.lost: list[str] = []
        self.profiles: dict[int, DeviceProfile] = {}
        self.traces: dict[int, Trace] = {}

    def wait_for_workers(self) -> None:
        """Serve until all workers wait to begin, or those that came within `wait_s`.

        Raises InvalidInput if a worker of this machine cannot work, WorkerLost if none comes.
        """
        expected = set(range(self._spec.config.workers))
        until_s = self._clock() + self._settings.wait_s
        self._serve(
            lambda: self._waiting.keys() == expected or (self._waiting and self._clock() > until_s)
        )
        for worker in sorted(expected - self._waiting.keys()):
            logger.warning("worker %d has not come; the others begin without it", worker)

    def train(self) -> None:
        """Let the workers begin, and serve until all units are trained on.

        Raises InvalidInput if a loss is not finite or a worker of this machine cannot work,
        WorkerLost if no worker is left, Interrupted when the state is saved.
        """
        self._has_begun = True
        self._log.begin(self._log.num_steps)
        self._admit()
        self.rounds.release()
        self._serve(lambda: self._is_over)

    @property
    def _is_over(self) -> bool:
        is_done = self.rounds.is_over and not self._log.is_testing
        return is_done and not self.rounds.members and bool(self._done)

    @property
    def _is_late(self) -> bool:
        return self._clock() - self._seen_s > self._settings.wait_s

    def close(self) -> tuple[int, int]:
        """Disconnect, let processes of this machine end; return the bytes sent and received."""
        self.rpc.close()
        if self._pool is not None:
            self._pool.close(_LEAVING_S)
        return self.rpc.sent_nbytes, self.rpc.received_nbytes

    def _serve(self, is_over: Callable[[], object]) -> None:
        while not is_over():
            event = self.rpc.receive(_POLL_S)
            if isinstance(event, RpcRequest):
                self._execute(event)
            elif isinstance(event, Lost):
                self._returning.discard(event.worker)
                self._drop(event.worker, event.why)
            elif isinstance(event, Joined):
                self._drop(event.worker, "has begun anew")
            if self._failure is not None:
                raise self._failure
            self._poll()

    def _execute(self, request: RpcRequest) -> None:
        worker, message = request.worker, request.message
        try:
            reply = self._reply(request)
        except (OutOfTurn, LeftOut) as error:
            if isinstance(error, LeftOut):
                self._leave_out(worker, error)
            self._returning.add(worker)
            reply = Message(AGAIN, message.step)
        except InvalidInput as error:
            # Workers of our own tell no lies: the others would fail alike.
            if self._pool is not None or isinstance(error, Diverged):
                self.rpc.reply(request, refusal(str(error)))
                raise
            why = f"is refused: {one_line(str(error))}"
            self._refusals.warning(f"worker {worker} {why}")
            self._drop(worker, why)
            reply = refusal(str(error))
        if reply is not None:
            self.rpc.reply(request, reply)
        self._go_on()

    def _reply(self, request: RpcRequest) -> Message | None:
        """Do what a request asks for, and return its reply; None if that comes later."""
        worker, message = request.worker, request.message
        self._turns_s[worker] = self._clock()
        match message.topic:
            case Topic.BEGIN:
                self._begin(request)
                return None
            case Topic.PART:
                self.relay.take(request)
                if self.relay.first_part_s is None:
                    self.relay.first_part_s = self._clock()
                if self._pool is not None:
                    self._pool.worked(worker)
                return None
            case Topic.ROUND:
                return self.relay.units(worker, message.step)
            case Topic.PROBE:
                return self._probes.reply(request)
            case Topic.CLOCK:
                return Message(Topic.CLOCK, time.monotonic_ns())
        self._note(worker, message)
        return Message(message.topic, message.step)

    def _note(self, worker: int, message: Message) -> None:
        """Record what a worker reports, which needs no reply."""
        match message.topic:
            case Topic.TESTED:
                self._log.tested(worker, message.step, self.relay.gate.tested(message))
            case Topic.SAVED:
                self._checkpoints.add(worker, message.step, self.relay.gate.own_state(message))
            case Topic.DONE:
                self._finish(worker, message)
            case Topic.PROFILE:
                self.profiles[worker] = decode(DeviceProfile, message)
                self.rounds.note_speed(worker, self.profiles[worker].step_s)
                self._answer(self._probes.end(worker))
            case Topic.FAILED:
                self._note_failure(worker, message)
            case _:
                raise InvalidInput(
                    "topic", f"a message about {message.topic!r}, which there is not"
                )

    def _begin(self, request: RpcRequest) -> None:
        """Let a worker wait for the next round, if it trains the same model."""
        there = b"".join(request.message.parts[:1]).decode(errors="replace")
        if (found := difference(self._layout, there)) is not None:
            raise InvalidInput("run", f"differs from the hub's: {one_line(found)}")
        self._drop(request.worker, "begins again")
        self._returning.discard(request.worker)
        self._waiting[request.worker] = request

    def _note_failure(self, worker: int, message: Message) -> None:
        told = one_line(b"".join(message.parts[:1]).decode(errors="replace"))
        if self._pool is not None and message.step:
            self._failure = InvalidInput(f"worker {worker}", f"worker {worker} failed: {told}")
        self._reasons[worker] = f"has failed: {told}"
        self._drop(worker, self._reasons[worker])

    def _go_on(self) -> None:
        """Complete the exchange if all parts are there, and let workers join."""
        before = self.rounds.exchange
        self._stops |= self.relay.go_on(stops=self.interruption.requested and not self._stops)
        if self.rounds.exchange != before:  # they have waited for each other
            self._turns_s |= dict.fromkeys(self.rounds.members, self._clock())
        self._admit()

    def _admit(self) -> None:
        """Let those begin that wait, if a round does."""
        if not (self._has_begun and self._waiting):
            return
        if self.rounds.members and not self.rounds.is_at_border:
            return
        for worker in sorted(self._waiting):
            request = self._waiting.pop(worker)
            self.rounds.admit(worker)
            self._turns_s[worker] = self._clock()
            if self.rounds.exchange > self._first_exchange:
                logger.info("worker %d takes part from round %d on", worker, self.rounds.round)
            self.rpc.reply(request, self.relay.state(worker))

    def _finish(self, worker: int, message: Message) -> None:
        self.traces[worker] = self.relay.finish(worker, message)
        self.rounds.drop(worker)
        self._done.add(worker)

    def _leave_out(self, worker: int, error: LeftOut) -> None:
        """Go on without a worker that is not like the others, until it has the group's state."""
        logger.warning("worker %d %s; it takes the group's", worker, error)
        self._drop(worker, str(error))
        if not isinstance(error, NotFinite) or self.rounds.posted:
            return
        exchange = self.rounds.exchange
        self._not_finite.add((worker, exchange))
        # Some may have begun again meanwhile.
        if all((one, exchange) in self._not_finite for one in self.rounds.members):
            self._failure = InvalidInput(
                "learning_rate",
                "the parameters or losses of all workers are NaN or infinite",
                hint="choose a smaller one",
            )

    def _drop(self, worker: int, why: str) -> None:
        self._answer(self._probes.forget(worker))
        self._waiting.pop(worker, None)
        self._log.drop(worker)
        self._checkpoints.drop(worker)
        if worker not in self.rounds.members:
            return
        self.rounds.drop(worker)
        self._last_words = f"worker {worker} {why}"
        if len(self.lost) < _MOST_LOST:
            self.lost.append(self._last_words)
        logger.info("worker %d %s: the others go on, with its share of the samples", worker, why)
        self._go_on()

    def _answer(self, requests: Iterable[RpcRequest]) -> None:
        """Execute what had to wait."""
        for request in requests:
            self._execute(request)

    def _poll(self) -> None:
        """Look after processes, those who are late, and checkpoints, a few times a second."""
        now_s = self._clock()
        if now_s - self._polled_s < _POLL_S:
            return
        self._polled_s = now_s
        for worker, why in self._pool.poll() if self._pool else ():
            self._last_words = f"worker {worker} {self._reasons.pop(worker, why)}"
            self._drop(worker, why)
        if self._pool is not None and self._pool.is_empty:
            raise WorkerLost(f"no worker is left; {self._last_words}")
        if (slow := self._probes.overdue()) is not None:
            self._answer(self._probes.end(slow))
        self._drop_late(now_s)
        self._refusals.flush()
        self._checkpoints.poll()
        self._log.show(len(self.rounds.members))
        if self.rounds.members or self._waiting:
            self._seen_s = now_s
        elif self._is_late and not (self.rounds.is_over and self._done):
            raise WorkerLost(
                f"no worker is left, and none came within {self._settings.wait_s:g} s; "
                f"{self._last_words}"
            )
        if self._stops and not self._checkpoints.is_pending:
            raise Interrupted("interrupted", self._log.num_steps)

    def _drop_late(self, now_s: float) -> None:
        """Go on without workers whose parts do not come, though they may be there."""
        for worker in sorted(self.rounds.missing):
            waits_s = now_s - self._turns_s[worker]
            if waits_s > self._longest_s(worker):
                self._drop(worker, f"is there, and has completed nothing for {waits_s:.0f} s")
        if self.relay.first_part_s is None or not self.rounds.missing:
            return
        waits_s = now_s - self.relay.first_part_s
        late_s = max(map(self._late_s, self.rounds.missing))
        if waits_s > self._settings.deadline_s + late_s:
            for worker in sorted(self.rounds.missing):
                self._drop(worker, f"has sent nothing for {waits_s:.0f} s")

    def _late_s(self, worker: int) -> float:
        """Return the seconds after which a worker's part is late: some times its steps' own."""
        units = self.rounds.members[worker].most_units
        known = worker in self.rounds.speeds
        return (_LATE if known else _LATE_IF_UNKNOWN) * self._unit_s(worker) * units

    def _unit_s(self, worker: int) -> float:
        """Return the seconds of an inner step of a worker, or of the slowest of the others.

        What it says of itself counts as far as others make it credible; 0 if nothing is known.
        """
        speeds = self.rounds.speeds
        slowest_s = max((s for one, s in speeds.items() if one != worker), default=inf)
        own_s = speeds.get(worker, slowest_s)
        return min(own_s, _MOST_UNEVEN * slowest_s) if speeds else 0.0

    def _longest_s(self, worker: int) -> float:
        """Return the seconds that a worker may take from our reply to its next request.

        It trains, or tests, or saves. Where nothing is known of any worker that may be any time.
        """
        if not self.rounds.speeds:
            return inf
        tests_s = _LATE * self._log.test_units * self._unit_s(worker)
        return _TIMES * self._settings.deadline_s + self._late_s(worker) + tests_s

    def dismiss(self, why: str) -> None:
        """Tell those who ask that the run is over, for a moment: they end with the reason."""
        until_s = time.monotonic() + _DISMISSAL_S
        left = set(self.rounds.members) | self._waiting.keys() | self._returning
        posted = [part.request for part in self.rounds.posted.values()]
        for request in (*self._waiting.values(), *posted):
            self.rpc.reply(request, refusal(why))
            left.discard(request.worker)
        while left and time.monotonic() < until_s:
            event = self.rpc.receive(_POLL_S)
            if isinstance(event, RpcRequest):
                self.rpc.reply(event, refusal(why))
            if isinstance(event, RpcRequest | Lost):
                left.discard(event.worker)


def _own_workers(
    devices: tuple[str, ...], threads: int, address: str, run_id: str, deadline_s: float
) -> list[WorkerProcessSettings]:
    """Return the settings of a process for each device of this machine."""
    return [
        WorkerProcessSettings(
            connect=address,
            run=run_id,
            deadline_s=deadline_s,
            workers=(number,),
            device=device,
            threads=threads,
        )
        for number, device in enumerate(devices)
    ]
