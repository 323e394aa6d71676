"""The hub: it waits for body workers, answers them in the order of arrival, and tests the model.

A request is executed at once, but for three: BEGIN waits until all workers are there, a fetch until
no live worker is too far behind (`ParameterServer.may_begin`), and a worker that measures its link
until no other one does. A worker that is lost takes its half-done step with it, and the others go
on; it may come back.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

from paceline.core.errors import Interrupted, InvalidInput, NonFinite, StepDiscarded, WorkerLost
from paceline.core.outcome import Epoch
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.exchange.session import Progress
from paceline.links.failpoints import reach
from paceline.links.interruption import Interruption
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.keys import load_hub_keys
from paceline.rpc.limits import Limits, RateLimitedLog, one_line
from paceline.rpc.probing import ProbeTurns
from paceline.rpc.progress_deadline import ProgressDeadline
from paceline.rpc.proportion import Proportions
from paceline.rpc.server import Joined, Lost, RpcRequest, Server, Woken
from paceline.rpc.workers import WorkerPool, num_threads, refusal
from paceline.strategies.wheel import protocol
from paceline.strategies.wheel.checkpoint import Checkpoints
from paceline.strategies.wheel.config import RunSpec, Wheel
from paceline.strategies.wheel.epochs import EpochLog, Test
from paceline.strategies.wheel.gate import Gate
from paceline.strategies.wheel.heads import HeadWorkers
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.measure import DeviceProfile
from paceline.strategies.wheel.membership import Membership
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.remote import REFUSED, SERVING, ChildSettings
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB
from paceline.strategies.wheel.trace import Trace
from paceline.strategies.wheel.tree import ChildHubs, ChildServer

logger = logging.getLogger(__name__)
_LOOPBACK = "tcp://127.0.0.1:0"
_POLL_S = 0.2
_DISMISSAL_S = 2.0
_LEAVING_S = 5.0  # for processes that are done to say good-bye
_RATE_WINDOW_S = 10.0
_MOST_LOST = 1000  # of reasons that are kept: a worker may come back and lie again
_WORKER_MODULE = "paceline.strategies.wheel.worker"
_UPDATES = (Topic.GRADIENTS, Topic.WHOLE_GRADIENTS)
_OF_STEPS = (Topic.PARAMETERS, Topic.ACTIVATIONS, Topic.WHOLE_PARAMETERS, *_UPDATES)


def _nothing() -> None:
    """Do nothing: nobody waits for a first worker."""


class Hub:
    """Serves body workers until all have done their steps.

    It listens for them, and starts those of `devices` on this machine if `settings` have no address
    to bind: what one of these finds wrong ends the run. What was opened and started is closed by
    `stack`. `test` tests the model, after each epoch and as often as `settings` say; `epochs` are
    those of a hub before. Without all workers, or any, the hub waits for `settings.wait_s`. Raises
    InvalidInput if the address cannot be listened on.
    """

    def __init__(
        self,
        stack: ExitStack,
        settings: TrainSettings | RehearseSettings | ChildSettings,
        run_id: str,
        job: TrainingJob,
        server: ParameterServer,
        progress: Progress,
        *,
        test: Test | None = None,
        devices: Sequence[str] = (),
        checkpoints: Checkpoints | None = None,
        epochs: list[Epoch] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config, max_nbytes = job.spec.config, job.max_message_nbytes
        limits = Limits(
            run_id,
            num_workers=config.workers,
            max_message_nbytes=max_nbytes,
            settings=job.spec.model_dump_json().encode(),
        )
        keys = None if settings.keys is None else load_hub_keys(settings.keys)
        self.rpc = Server(settings.bind or _LOOPBACK, limits, keys=keys, clock=clock)
        stack.callback(self.rpc.close)
        self._deadline_s, self._clock = settings.deadline_s, clock
        self._pool: WorkerPool | None = None
        if settings.bind is None:
            self._pool = self._own_processes(run_id, job.spec, devices)
            stack.callback(self._pool.close)
        else:
            logger.info("listening on %s; waiting for %d workers", self.rpc.address, config.workers)
        self._server, self.heads = server, HeadWorkers(server, job)
        self._gate = Gate(server.workers, job.spec.num_steps, job.layout, lambda: server.version)
        self._progress_deadline = ProgressDeadline(settings.deadline_s, clock)
        if settings.bind is not None:  # workers of this machine tell no lies
            server.proportions = Proportions()
        self._not_finite: set[int] = set()
        self._progress = progress
        self._checkpoints = checkpoints
        every = settings.evaluate_every if isinstance(settings, TrainSettings) else None
        self.log = EpochLog(job, progress, test, every, [] if epochs is None else epochs)
        self.children = ChildHubs(server, job.spec.num_steps)
        self._held: list[RpcRequest] = []  # fetches of those too far ahead
        self._probes = ProbeTurns(max_nbytes, settings.deadline_s, clock)
        self._begins: dict[int, RpcRequest] = {}  # without a reply, by worker
        self._membership = Membership(server.workers, settings.wait_s, self._admit, clock)
        self.lost: list[str] = []  # why each worker was lost
        self._refusals = RateLimitedLog(logger)
        self._polled_s = 0.0
        self._recent: deque[tuple[float, int, int]] = deque()  # seconds, samples, bytes
        self._failure: InvalidInput | WorkerLost | None = None
        self.interruption = Interruption()
        self._on_first: Callable[[], None] = _nothing
        self.profiles: dict[int, DeviceProfile] = {}
        self.trace = Trace()

    def _own_processes(self, run_id: str, spec: RunSpec, devices: Sequence[str]) -> WorkerPool:
        """Start this machine's processes: a worker for each device, or a tree's child hubs."""
        if spec.tree is not None:
            return WorkerPool(SERVING, self._child_hubs(run_id, spec.tree))
        lanes = spec.config.workers_by_device
        own = [
            WorkerProcessSettings(
                connect=self.rpc.address,
                run=run_id,
                deadline_s=self._deadline_s,
                workers=tuple(workers),
                device=device,
                threads=num_threads(len(lanes)),
            )
            for device, workers in zip(devices, lanes.values(), strict=True)
        ]
        return WorkerPool(_WORKER_MODULE, own)

    def _child_hubs(self, run_id: str, tree: Wheel) -> list[ChildSettings]:
        set_by_itself = {"workers", *REFUSED}
        options = {n: value for n, value in asdict(tree).items() if n not in set_by_itself}
        return [
            ChildSettings(
                connect=self.rpc.address,
                run=run_id,
                deadline_s=self._deadline_s,
                number=number,
                workers=tree.workers_of_hub,
                gather=tree.gathered,
                options=options,
            )
            for number in range(tree.child_hubs)
        ]

    def wait_for_workers(self, on_first: Callable[[], None] = _nothing) -> None:
        """Serve until all workers wait to begin, or those that came within `wait_s`.

        `on_first` is called when the first of them is there, and goes on to measure.
        Raises InvalidInput if a worker of this machine cannot work, WorkerLost if none comes.
        """
        self._on_first = on_first
        self._serve(lambda: self._membership.is_ready)

    def train(self) -> None:
        """Let the workers begin, and serve until all that are there have done their steps.

        Raises InvalidInput if a loss is not finite or a worker of this machine cannot work,
        WorkerLost if no worker is left.
        """
        self.log.begin()
        self._membership.begin()
        self._serve(lambda: self._membership.is_over)
        for endpoint in self.heads.endpoints:
            self.trace.add(endpoint.recorder.trace)

    def close(self) -> tuple[int, int]:
        """Disconnect, let processes of this machine end; return the bytes sent and received."""
        self.rpc.close()
        if self._pool is not None:
            self._pool.close(_LEAVING_S)
        return self.rpc.sent_nbytes, self.rpc.received_nbytes

    def _serve(self, is_over: Callable[[], bool]) -> None:
        try:
            while not is_over():
                event = self.rpc.receive(_POLL_S)
                if isinstance(event, RpcRequest):
                    self._execute(event)
                elif isinstance(event, Lost):
                    self._drop(event.worker, event.why)
                elif isinstance(event, Joined):
                    self._on_first, on_first = _nothing, self._on_first
                    on_first()
                    self._drop(event.worker, "has begun anew")
                elif isinstance(event, Woken):
                    # For a child hub: its parent has replied, and may have begun anew.
                    if isinstance(self._server, ChildServer) and self._server.poll_parent():
                        self._membership.restart()
                    self._go_on()
                if self._failure is not None:
                    raise self._failure
                self._poll()
        except (InvalidInput, WorkerLost) as error:
            self._dismiss(str(error))
            raise

    def _execute(self, request: RpcRequest) -> None:
        worker, message = request.worker, request.message
        self._progress_deadline.requested(worker)
        try:
            reply = self._reply(request)
        except StepDiscarded as error:
            logger.info("%s", error)
            reply = Message(Topic.AGAIN, message.step)
        except NonFinite as error:
            reply = refusal(str(error))
            self._not_finite.add(worker)
            if self._pool is not None or self._server.workers.live <= self._not_finite:
                self.rpc.reply(request, reply)
                raise InvalidInput("learning_rate", str(error)) from None
            self._refuse(worker, error)
        except InvalidInput as error:
            reply = refusal(str(error))
            if self._pool is not None:  # our own, which tells no lies: the others would fail alike
                self.rpc.reply(request, reply)
                raise
            self._refuse(worker, error)
        if reply is not None:
            self._send(request, reply)
        if message.topic in (*_UPDATES, Topic.DONE):
            reach("hub.updated", version=self._server.version)
            self._go_on()

    def _send(self, request: RpcRequest, reply: Message) -> None:
        """Reply to a worker, whose turn it is then."""
        self.rpc.reply(request, reply)
        if request.worker in self._server.workers.live:
            self._progress_deadline.replied(request.worker)

    def _refuse(self, worker: int, error: InvalidInput | NonFinite) -> None:
        """Go on without a worker whose request no honest one would make; it may begin anew."""
        why = f"is refused: {one_line(str(error))}"
        self._refusals.warning(f"worker {worker} {why}")
        self._drop(worker, why)

    def _reply(self, request: RpcRequest) -> Message | None:
        """Do what a request asks for, and return its reply; None if that comes later."""
        worker, message = request.worker, request.message
        if message.topic in _OF_STEPS and not self._server.workers.of(worker).is_live:
            # It begins again, and may have parameters that a server which is back has not made.
            return Message(Topic.AGAIN, message.step)
        self._gate.check(worker, message)
        match Topic(message.topic):
            case Topic.PARAMETERS | Topic.WHOLE_PARAMETERS:
                return self._fetch(request)
            case Topic.WHOLE_GRADIENTS:
                is_first = worker == min(self._server.workers.live)
                self.log.count(self.children.update(worker, message, is_first=is_first))
                # The rest of a child hub's request is a fetch.
                fetch = Message(Topic.WHOLE_PARAMETERS, message.step)
                return self._fetch(replace(request, message=fetch))
            case Topic.ACTIVATIONS:
                return self.heads.answer(worker, message, request.arrived_s)
            case Topic.GRADIENTS:
                update, losses = self.heads.update(worker, message, request.arrived_s)
                self.log.count(losses)
                return update
            case Topic.BEGIN:
                self._gate.check_layout(message)
                self._begins[worker] = request
                self._membership.wait(worker, message.step)  # replies now or later, by _admit
                return None
            case Topic.PROBE:
                return self._probes.reply(request)
            case Topic.CLOCK:
                return Message(Topic.CLOCK, time.monotonic_ns())
        self._note(worker, message)
        return Message(message.topic, message.step)

    def _note(self, worker: int, message: Message) -> None:
        """Record what a worker reports, which needs no reply."""
        match message.topic:
            case Topic.PROFILE:
                self.profiles[worker] = self._gate.profile(message)
                self._answer(self._probes.end(worker))
            case Topic.BUFFERS:
                # Nobody knows how to merge running means: one worker's are taken.
                values = self._gate.buffers(message)
                if worker == min(self._server.workers.live, default=-1):
                    protocol.load_buffers(self._server.halves.body, values)
            case Topic.DONE:
                self._finish(worker, message)
            case Topic.FAILED:
                why = f"worker {worker} failed: {self._gate.words(message)}"
                if self._pool is not None:
                    self._failure = InvalidInput.of(why) if message.step else WorkerLost(why)
                else:
                    logger.info("%s", why)
                    self._drop(worker, "has failed")
            case _:
                raise InvalidInput(
                    "topic", f"{message.topic} is what the hub replies, and nothing to ask"
                )

    def _finish(self, worker: int, message: Message) -> None:
        """Record that a worker has done its steps; one that was dropped begins again."""
        if worker not in self._server.workers.live:
            raise StepDiscarded(f"worker {worker} was dropped before it was done")
        is_child = worker in self.children.workers
        self.trace.add(self._gate.trace(worker, message, is_child=is_child))
        if is_child and (report := self._gate.report(message)) is not None:
            self.children.reports[worker] = report
        self.children.finish(worker, message.step)
        self._membership.finish(worker)
        self._progress_deadline.forget(worker)

    def _admit(self, worker: int, step: int) -> None:
        """Tell a worker that waits to begin which step is its next."""
        below = self._server.workers.of(worker).below
        parts = (protocol.numbers_part(below),) if below else ()
        self._gate.begins(worker, step)
        self._send(self._begins.pop(worker), Message(Topic.BEGIN, step, parts=parts))

    def _answer(self, requests: Iterable[RpcRequest]) -> None:
        """Execute what had to wait."""
        for request in requests:
            self._execute(request)

    def _fetch(self, request: RpcRequest) -> Message | None:
        if not self._server.may_begin(request.worker, request.message.step):
            self._held.append(request)
            return None
        if request.message.topic == Topic.WHOLE_PARAMETERS:
            return self.children.fetch(request.worker, request.message)
        return self.heads.fetch(request.worker, request.message)

    def _go_on(self) -> None:
        """Answer those who may begin now, and test the model if it is time to."""
        waiting, self._held = self._held, []
        self._answer(waiting)
        started_s = self._clock()
        if self.log.test(self._membership.num_steps):
            self._server.model.train()
            self._progress_deadline.paused(self._clock() - started_s)

    def _drop(self, worker: int, why: str) -> None:
        self._held = [request for request in self._held if request.worker != worker]
        self._answer(self._probes.forget(worker))
        self._begins.pop(worker, None)
        self._progress_deadline.forget(worker)
        if not self._membership.drop(worker):
            return
        if len(self.lost) < _MOST_LOST:
            self.lost.append(f"worker {worker} {why}")
        logger.info(
            "worker %d %s: its half-done step is dropped, and its share of the samples is left out "
            "until it is back",
            *(worker, why),
        )
        self._go_on()

    def _poll(self) -> None:
        """Look after processes, those who wait, checkpoints and progress, a few times a second."""
        now_s = self._clock()
        if now_s - self._polled_s < _POLL_S:
            return
        self._polled_s = now_s
        if self.interruption.requested:  # workers elsewhere wait for a hub that goes on
            raise Interrupted("interrupted", self._server.version)
        for worker, why in self._pool.poll() if self._pool else ():
            self._membership.mark_dead(worker, why)
            self._drop(worker, why)
        if (slow := self._probes.overdue()) is not None:
            self._answer(self._probes.end(slow))
        if not self._membership.has_begun:
            return
        for worker, seconds in self._progress_deadline.overdue().items():
            self._drop(worker, f"is there, and has completed nothing for {seconds:.0f} s")
        self._refusals.flush()
        self._membership.poll()
        if self._checkpoints is not None:
            self._checkpoints.save_if_due(self.log.epochs)
        # The speed of the run over the last seconds.
        nbytes = sum(self.heads.nbytes[purpose] for purpose in (*TO_HUB, *FROM_HUB))
        nbytes += self.children.traffic.nbytes.total()
        recent, now = self._recent, (self.log.trained_s, self.log.num_samples, nbytes)
        recent.append(now)
        while now[0] - recent[0][0] > _RATE_WINDOW_S and len(recent) > 2:
            recent.popleft()
        seconds, samples, travelled = (new - old for new, old in zip(now, recent[0], strict=True))
        if samples:
            self._progress.status(
                f"update {self._server.version:,}: {samples / seconds:,.0f} samples/s, "
                f"{len(self._server.workers.live)} workers, staleness "
                f"{self._server.updates.mean_staleness:.1f}, {travelled / seconds / 1e6:,.1f} MB/s,"
                f" {nbytes / 1e6:,.0f} MB so far"
            )

    def _dismiss(self, why: str) -> None:
        """Tell those who ask that the run is over, for a moment: they end with the reason."""
        until_s, left = time.monotonic() + _DISMISSAL_S, set(self._server.workers.live)
        for request in (*self._held, *self._begins.values()):
            self.rpc.reply(request, refusal(why))
        while left and time.monotonic() < until_s:
            event = self.rpc.receive(_POLL_S)
            if isinstance(event, RpcRequest):
                self.rpc.reply(event, refusal(why))
            if isinstance(event, RpcRequest | Lost):
                left.discard(event.worker)
