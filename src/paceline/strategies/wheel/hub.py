"""The hub: it waits for body workers, answers them in the order of arrival, and tests the model.

A request is executed at once, but for three: the first BEGIN waits until all workers are there, a
fetch until no live worker is too far behind (`ParameterServer.may_begin`), and a worker that tries
its way to the hub until no other one does. A worker that is lost takes
its half-done step with it, and the others go on; it may come back.
"""

import time
from dataclasses import replace

from paceline.core.errors import InvalidInput, NonFinite, StepDiscarded, WorkerLost
from paceline.strategies.wheel.coding import Parts, parts_of
from paceline.strategies.wheel.half import load_buffers
from paceline.strategies.wheel.heads import HeadWorkers
from paceline.strategies.wheel.job import Job, Topic
from paceline.strategies.wheel.profile import Profile
from paceline.strategies.wheel.roll import Roll
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Conduct, Status, Tally
from paceline.strategies.wheel.trace import Record, record_of
from paceline.strategies.wheel.trunk import Trunk
from paceline.wire.inbox import Joined, Lost, Request, Woken
from paceline.wire.messages import Message
from paceline.wire.service import Service
from paceline.wire.texts import one_line

_LOOK_S = 0.2
_DISMISSAL_S = 2.0
_UPDATES = (Topic.GRADIENTS, Topic.WHOLE_GRADIENTS)
_OF_STEPS = (Topic.PARAMETERS, Topic.ACTIVATIONS, Topic.WHOLE_PARAMETERS, *_UPDATES)


class Hub:
    """Serves body workers until all have done their steps. A `tally` is that of a hub before."""

    def __init__(
        self,
        service: Service,
        server: ParameterServer,
        heads: HeadWorkers,
        job: Job,
        layout: str,
        steps_per_epoch: int,
        conduct: Conduct,
        tally: Tally | None = None,
    ) -> None:
        self._service, self._server, self._heads = service, server, heads
        self.trunk = Trunk(server, steps_per_epoch * job.epochs)
        self._steps_per_epoch, self._conduct = steps_per_epoch, conduct
        self._held: list[Request] = []  # fetches of those who are too far ahead
        self._trials: list[Request] = []  # of ways to here, while another worker tries its own
        self._trying: int | None = None
        self._roll = Roll(
            job.config.workers, layout, server, service.reply, self._note_beginning, conduct
        )
        self.tally = Tally() if tally is None else tally
        self._before_s = sum(epoch.seconds for epoch in self.tally.epochs)
        self._began_s = self._paused_s = self._looked_s = 0.0
        self._failure: InvalidInput | WorkerLost | None = None
        self.profiles: dict[int, Profile] = {}
        self.record = Record()

    @property
    def trained_s(self) -> float:
        """Seconds of training, without tests, and with those before a restart."""
        since_s = time.monotonic() - self._began_s - self._paused_s if self._began_s else 0.0
        return self._before_s + since_s

    def run(self) -> None:
        """Serve until all workers that are there have done their steps.

        Raises InvalidInput if a loss is not finite or a worker of this machine cannot work,
        WorkerLost if no worker is left, or comes.
        """
        try:
            while not self._roll.is_over:
                event = self._service.receive(_LOOK_S)
                if isinstance(event, Request):
                    self._execute(event)
                elif isinstance(event, Lost):
                    self._lose(event.worker, event.why)
                elif isinstance(event, Joined):
                    self._lose(event.worker, "has begun anew")
                elif isinstance(event, Woken):
                    self._renew()
                if self._failure is not None:
                    raise self._failure
                self._look()
        except (InvalidInput, WorkerLost) as error:
            self._dismiss(str(error))
            raise
        self.record.add(self._heads.record())

    def _execute(self, request: Request) -> None:
        worker, message = request.worker, request.message
        try:
            reply = self._reply(request)
        except StepDiscarded as error:
            self._conduct.say(f"{error}")
            reply = Message(Topic.AGAIN.value, message.step)
        except NonFinite as error:
            self._service.reply(request, _refusal(str(error)))
            raise InvalidInput(f"learning_rate: {error}") from None
        except InvalidInput as error:
            self._conduct.say(f"worker {worker} is refused: {error}")
            reply = _refusal(str(error))
        if reply is not None:
            self._service.reply(request, reply)
        if message.topic in (*_UPDATES, Topic.DONE):
            self._go_on()

    def _reply(self, request: Request) -> Message | None:
        """Do what a request asks for; None if its reply comes later."""
        worker, message = request.worker, request.message
        if message.topic in _OF_STEPS and worker not in self._roll.live:
            return Message(Topic.AGAIN.value, message.step)
        match message.topic:
            case Topic.PARAMETERS | Topic.WHOLE_PARAMETERS:
                return self._fetch(request)
            case Topic.WHOLE_GRADIENTS:
                return self._merge(request)
            case Topic.ACTIVATIONS:
                return self._heads.answer(worker, message, request.arrived_s)
            case Topic.GRADIENTS:
                return self._update(worker, message, request.arrived_s)
            case Topic.BEGIN:
                self._roll.begin(request)
                return None
            case Topic.PROBE:
                return self._try(request)
            case Topic.CLOCK:
                return Message(Topic.CLOCK.value, time.monotonic_ns())
        self._take_note(worker, message, parts_of(message))
        return Message(message.topic, message.step)

    def _try(self, request: Request) -> Message | None:
        """Fill the way to a worker that tries it; one after the other, as they may share it."""
        if self._trying not in (None, request.worker):
            self._trials.append(request)
            return None
        self._trying = request.worker
        filling = self._heads.filling(request.message.step)
        return Message(Topic.PROBE.value, parts=(filling,))

    def _end_trial(self, worker: int) -> None:
        """Let the next worker try its way, if this one did."""
        waiting = [request for request in self._trials if request.worker != worker]
        if self._trying in (None, worker):
            self._trying, self._trials = None, []
            for request in waiting:
                self._execute(request)
        else:
            self._trials = waiting

    def _take_note(self, worker: int, message: Message, parts: Parts) -> None:
        """Note what a worker says that asks for nothing."""
        topic = message.topic
        if len(parts) != 1:
            raise InvalidInput(f"{topic}: {len(parts)} parts")
        match topic:
            case Topic.PROFILE:
                self.profiles[worker] = Profile.of(bytes(parts[0]))
                self._end_trial(worker)
            case Topic.BUFFERS:
                if worker == min(self._roll.live, default=worker):
                    load_buffers(self._server.halves.body, parts[0])
            case Topic.DONE:
                self._finish(worker, message.step, bytes(parts[0]))
            case Topic.FAILED:
                told = one_line(bytes(parts[0]).decode(errors="replace"))
                self._fail(worker, f"worker {worker} failed: {told}", by_input=bool(message.step))
            case _:
                raise InvalidInput(f"a message about {topic!r}, which there is not")

    def _fetch(self, request: Request) -> Message | None:
        if not self._server.may_begin(request.worker, request.message.step):
            self._held.append(request)
            return None
        if request.message.topic == Topic.WHOLE_PARAMETERS:
            return self.trunk.fetch(request.worker, request.message)
        return self._heads.fetch(request.worker, request.message)

    def _merge(self, request: Request) -> Message | None:
        """Update with what a child hub has gathered; the rest of its request is a fetch."""
        worker, message = request.worker, request.message
        is_first = worker == min(self._roll.live)
        learnt = self.trunk.update(worker, message, is_first=is_first)
        for epoch, own in learnt.items():
            self.tally.learnt(epoch, own, self.trained_s)
        fetch = Message(Topic.WHOLE_PARAMETERS.value, message.step)
        return self._fetch(replace(request, message=fetch))

    def _update(self, worker: int, message: Message, at_s: float) -> Message:
        reply, learnt = self._heads.update(worker, message, at_s)
        if learnt is not None:
            self.tally.learnt(message.step // self._steps_per_epoch, learnt, self.trained_s)
        return reply

    def _renew(self) -> None:
        """See to what has come of a parent."""
        if self._conduct.renew():
            self._roll.restart()
        self._go_on()

    def _go_on(self) -> None:
        """Answer those who may begin now, and test the model if an epoch is complete."""
        waiting, self._held = self._held, []
        for request in waiting:
            self._execute(request)
        while len(self.tally.epochs) < self._roll.reached // self._steps_per_epoch:
            self._test(len(self.tally.epochs))

    def _test(self, number: int) -> None:
        started_s, trained_s = time.monotonic(), self.trained_s
        before_s = sum(epoch.seconds for epoch in self.tally.epochs)
        loss = self.tally.mean_loss(number)
        self.tally.epochs.append(self._conduct.test(number, loss, trained_s - before_s))
        self._server.model.train()
        self._paused_s += time.monotonic() - started_s

    def _finish(self, worker: int, step: int, record: bytes) -> None:
        self.record.add(record_of(record))
        self.trunk.finish(worker, step)
        self._roll.finish(worker)

    def _fail(self, worker: int, why: str, *, by_input: bool) -> None:
        if self._conduct.is_local:
            self._failure = InvalidInput(why) if by_input else WorkerLost(why)
        else:
            self._conduct.say(why)
            self._lose(worker, "has failed")

    def _lose(self, worker: int, why: str) -> None:
        """Go on without a worker."""
        self._end_trial(worker)
        self._held = [request for request in self._held if request.worker != worker]
        if not self._roll.lose(worker):
            return
        self.tally.lost.append(f"worker {worker} {why}")
        self._conduct.say(
            f"worker {worker} {why}: its half-done step is dropped, and its share of the samples "
            "is left out until it is back"
        )
        self._go_on()

    def _look(self) -> None:
        """See to all that is not asked for."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        for worker, why in self._conduct.gone():
            self._roll.strike(worker, why)
            self._lose(worker, why)
        self._roll.look()
        self._conduct.look(self.status)

    def _note_beginning(self) -> None:
        self._conduct.begun(self.profiles)
        self._began_s = time.monotonic()

    @property
    def status(self) -> Status:
        """How far the run is."""
        done = self._server.statistics
        return Status(
            self._server.version,
            len(self.tally.epochs),
            self.trained_s,
            self.tally.num_samples,
            done.mean_staleness,
            self._heads.travelled + self.trunk.travelled,
            tuple(sorted(self._roll.live)),
        )

    def _dismiss(self, why: str) -> None:
        """Tell those who ask that the run is over."""
        until_s, left = time.monotonic() + _DISMISSAL_S, set(self._roll.live)
        for request in (*self._held, *self._roll.waiting):
            self._service.reply(request, _refusal(why))
        while left and time.monotonic() < until_s:
            event = self._service.receive(_LOOK_S)
            if isinstance(event, Request):
                self._service.reply(event, _refusal(why))
            if isinstance(event, Request | Lost):
                left.discard(event.worker)


def _refusal(why: str) -> Message:
    return Message(Topic.REFUSED.value, parts=(why.encode(),))
