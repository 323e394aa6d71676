"""Check and execute workers' requests at the hub, and encode the replies.

If a request is invalid, the hub drops the worker that sent it; the other workers continue.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from pydantic import TypeAdapter

from paceline.core.errors import InvalidInput, WorkerLost, printable
from paceline.core.outcome import SentShare, Traffic
from paceline.core.reading import read_peer_record
from paceline.core.wire_format import Purpose
from paceline.measure.device_profile import DeviceProfile
from paceline.record.worker_trace import Trace
from paceline.rpc import tensor_parts
from paceline.rpc.frames import Message
from paceline.rpc.limits import MOST_TEXT
from paceline.rpc.server import RpcRequest
from paceline.rpc.tensor_parts import CopyLane, Endpoint
from paceline.rpc.workers import difference
from paceline.strategies.wheel.epochs import EpochLog
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.measure import recorders_of
from paceline.strategies.wheel.protocol import ASKED, OF_LIVE, Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, messages
from paceline.strategies.wheel.staleness import Workers
from paceline.strategies.wheel.tree import ChildHubs, ChildReport, traffic_of
from paceline.strategies.wheel.worker_group import ProbeTurns, WorkerGroup

_TRACE, _PROFILE = TypeAdapter(Trace), TypeAdapter(DeviceProfile)
_REPORT = TypeAdapter(ChildReport)
_ONCE = (Topic.ACTIVATIONS, Topic.GRADIENTS)  # not allowed for steps that are already completed
_OF_BODIES = (Topic.PARAMETERS, *_ONCE)
_AHEAD = 1  # a request may be at most this many steps ahead of the worker's next step


class Gate:
    """Checks whether a request is allowed now; `version` returns the number of updates so far."""

    def __init__(
        self, workers: Workers, num_steps: int, layout: str, version: Callable[[], int]
    ) -> None:
        self._workers, self._num_steps = workers, num_steps
        self._layout, self._version = layout, version
        self._newest = 0  # highest version seen; when a parent hub restarts, the version may fall

    def check(self, worker: int, message: Message) -> Topic:
        """Return the topic of a request; raise InvalidInput if the request is not allowed now."""
        if message.topic not in ASKED:
            raise InvalidInput("topic", "is not a request that workers send", got=message.topic)
        topic = Topic(message.topic)
        self._newest = max(self._newest, self._version())
        if not 0 <= message.version <= self._newest:
            problem = f"version must be from 0 to {self._newest}"
            raise InvalidInput(topic, problem, got=message.version)
        if topic is Topic.PROBE:
            return topic  # in a PROBE, `step` is a number of bytes: skip the checks of steps
        if not 0 <= message.step <= self._num_steps:
            raise InvalidInput(topic, f"step must be from 0 to {self._num_steps}", got=message.step)
        reached = self._workers.of(worker).next_step
        is_over = topic in _ONCE and message.step < reached
        if is_over or (topic in _OF_BODIES and message.step > reached + _AHEAD):
            problem = f"step must be {reached} or {reached + _AHEAD}"
            raise InvalidInput(topic, problem, got=message.step)
        return topic

    def check_layout(self, message: Message) -> None:
        """Raise InvalidInput if a worker's description of the run differs from the hub's."""
        there = b"".join(message.parts[:1]).decode(errors="replace")
        if (found := difference(self._layout, there)) is not None:
            raise InvalidInput("run", f"worker and hub have different settings or data: {found}")

    def profile(self, message: Message) -> DeviceProfile:
        """Decode the measured speeds of a worker's device and link; InvalidInput for bad data."""
        (told,) = tensor_parts.parts_of(message, 1)
        found = read_peer_record(_PROFILE, told, "profile")
        if any(one.link is None for one in (found, *found.below)):
            raise InvalidInput("profile", "must contain the measured speed of the link to the hub")
        if any(one.below for one in found.below):
            raise InvalidInput("profile", "cannot contain a child hub below another child hub")
        return found

    def done(
        self, worker: int, message: Message, *, is_child: bool
    ) -> tuple[Trace, ChildReport | None]:
        """Decode a DONE request: the worker's trace; in rehearsals, also a child hub's report.

        Raises InvalidInput if the worker has not completed all steps.
        """
        completed = message.step if is_child else self._workers.of(worker).next_step
        if completed < self._num_steps:
            raise InvalidInput("done", f"requires {self._num_steps} completed steps", got=completed)
        traced, *told = tensor_parts.parts_of(message, *((1, 2) if is_child else (1,)))
        found = read_peer_record(_TRACE, traced, "trace")
        found.check(worker, self._num_steps, (*TO_HUB, *FROM_HUB))
        return found, read_peer_record(_REPORT, told[0], "report") if told else None


class Answers:
    """Executes the requests of workers, and encodes the replies.

    `waiting`: requests that had to wait; the hub executes them again after events that may end the
    wait, and a few times a second.
    `profiles`: the measured speed of each worker's device. `trace`: the recorded computation and
    messages of finished workers. `recorders`: record the hub's computation, one per worker.
    `nbytes`: the bytes of messages by purpose (figure 2 of Du et al. 2017). `num_pushed`: the
    number of messages with gradients of the first layers.
    """

    def __init__(
        self,
        server: ParameterServer,
        job: TrainingJob,
        group: WorkerGroup,
        log: EpochLog,
        probes: ProbeTurns,
    ) -> None:
        self._server, self._job = server, job
        self._group, self._log, self._probes = group, log, probes
        spec, device = job.spec, job.device
        self.children = ChildHubs(server, spec.num_steps)
        self._gate = Gate(server.workers, spec.num_steps, job.layout, lambda: server.version)
        self.waiting: list[RpcRequest] = []  # requests that cannot be executed yet
        self.profiles: dict[int, DeviceProfile] = {}
        self.trace = Trace()
        self.nbytes: Counter[Purpose] = Counter()
        self.num_pushed = 0
        in_body = job.halves.body_parameters
        self._num_body = sum(parameter.numel() for parameter in in_body)
        self._head_nbytes = sum(parameter.nbytes for parameter in job.halves.head_parameters)
        self.recorders = recorders_of(server, spec.traced)

        def endpoints_on(where: torch.device) -> list[Endpoint]:
            copies, dtype = CopyLane(where), in_body[0].dtype
            return [Endpoint(spec.config.codecs, dtype, one, copies) for one in self.recorders]

        # The head's device encodes and decodes activations and their gradients. The device in whose
        # memory the server keeps the model does so for the body's parameters and gradients.
        self._of_head = self._of_server = endpoints_on(device)
        if job.kept_on != device:
            self._of_server = endpoints_on(job.kept_on)

    def execute(self, request: RpcRequest) -> Message | None:
        """Check and execute a request; return the reply, or None if the reply must wait.

        Raises InvalidInput if the request is not allowed now. If it reports the worker's failure,
        raises InvalidInput for a failure by invalid input, otherwise WorkerLost.
        """
        worker, message = request.worker, request.message
        if message.topic in OF_LIVE and worker not in self._server.workers.live:
            # The hub has dropped this worker, or was restarted: the worker must send BEGIN again.
            return Message(Topic.AGAIN, message.step)
        handlers: dict[Topic, Callable[[RpcRequest], Message | None]] = {
            Topic.PARAMETERS: self._fetch,
            Topic.WHOLE_PARAMETERS: self._fetch,
            Topic.WHOLE_GRADIENTS: self._merge,
            Topic.ACTIVATIONS: self._answer,
            Topic.GRADIENTS: self._update,
            Topic.BEGIN: self._begin,
            Topic.PROBE: self._probe,
            Topic.CLOCK: lambda _: Message(Topic.CLOCK, time.monotonic_ns()),
            Topic.PROFILE: self._keep_profile,
            Topic.BUFFERS: self._load_buffers,
            Topic.DONE: self._finish,
            Topic.FAILED: self._fail,
        }
        return handlers[self._gate.check(worker, message)](request)

    def forget(self, worker: int) -> None:
        """Drop a lost worker's waiting requests, and end its link measurement, if any."""
        self.waiting = [request for request in self.waiting if request.worker != worker]
        self._probes.forget(worker)

    def traffic(self) -> tuple[Traffic, ...]:
        """Return the sent and the planned bytes of messages, by purpose.

        Messages between child hubs and their workers are included if the child hubs report them.
        """
        counted, planned = Counter[Purpose](), Counter[Purpose]()
        for report in (self.report(), *self.children.reports.values()):
            counted.update(report.nbytes)
            planned.update(report.planned_nbytes)
        within = tuple(
            Traffic(one.value, counted[one], planned[one], one in (*TO_HUB, *FROM_HUB))
            for one in Purpose
        )
        nbytes = self._job.workload.gradient_nbytes
        return within + traffic_of(self.children.counts, self._server, nbytes)

    def report(self) -> ChildReport:
        """Return the bytes between hub and workers: sent, and by Table 1 of Du et al. 2017."""
        job, spec = self._job, self._job.spec
        sizes: Counter[int] = Counter()  # number of batches of each size, over all workers
        for worker in set(range(spec.config.workers)) - self.children.workers:
            each = [job.share(worker, step)[0] for step in range(job.steps_per_epoch)]
            whole, rest = divmod(spec.num_steps, len(each))
            sizes.update(each * whole + each[:rest])
        planned: Counter[Purpose] = Counter()
        for size, times in sizes.items():
            for purpose, message in messages(job.parts.resized(size), spec.config).items():
                planned[purpose] += times * message.nbytes
        return ChildReport(nbytes=self.nbytes, planned_nbytes=planned, num_pushed=self.num_pushed)

    def sent_share(self) -> SentShare | None:
        """Compare the share of gradient values that were sent with the codec's declared share.

        Returns None if no codec encodes gradients.
        """
        config = self._job.spec.config
        size = messages(self._job.parts, config)[Purpose.GRADIENTS]
        if size.wire_format is None:
            return None
        reports = (self.report(), *self.children.reports.values())
        num_pushed = sum(one.num_pushed for one in reports)
        nbytes = sum(one.nbytes.get(Purpose.GRADIENTS, 0) for one in reports)
        measured = size.wire_format.sent_share(size.num_values, nbytes, num_pushed)
        return SentShare.of(config.gradients, measured)

    def _fetch(self, request: RpcRequest) -> Message | None:
        """Reply with the parameters of the body or, to a child hub, of all layers.

        Returns None if the worker is too far ahead of the others, and so must wait.
        """
        worker, step = request.worker, request.message.step
        if not self._server.may_begin(worker, step):
            self.waiting.append(request)
            return None
        if request.message.topic == Topic.WHOLE_PARAMETERS:
            return self.children.fetch(worker, request.message)
        version, values = self._server.body_parameters()
        reply = self._of_server[worker].message(Purpose.PARAMETERS, step, version, values)
        self.nbytes[Purpose.PARAMETERS] += reply.nbytes
        return reply

    def _answer(self, request: RpcRequest) -> Message:
        """Run the head (last layers) on received activations; reply with activation gradients."""
        worker, message, at_s = request.worker, request.message, request.arrived_s
        endpoint, step = self._of_head[worker], message.step
        batches, parts = self._job.batches, tensor_parts.parts_of(message)
        if len(parts) <= batches.num_parts:
            raise InvalidInput(
                "activations",
                f"must follow the {batches.num_parts} parts of targets in the message",
            )
        count, weight = self._job.share(worker, step)
        of_targets, rest = parts[: batches.num_parts], parts[batches.num_parts :]
        for purpose in (Purpose.LABELS, Purpose.ACTIVATIONS):
            endpoint.recorder.received(step, purpose, at_s)
        batches.check_parts(of_targets, count)
        targets = batches.targets(endpoint.to_device(step, Purpose.LABELS, of_targets), count)
        buffers = endpoint.to_device(step, Purpose.ACTIVATIONS, rest)
        shape = (count, *self._job.halves.crossing)
        values = endpoint.decode(step, Purpose.ACTIVATIONS, buffers, prod(shape))
        self.nbytes[Purpose.LABELS] += sum(part.nbytes for part in of_targets)
        self.nbytes[Purpose.ACTIVATIONS] += sum(part.nbytes for part in rest)
        torch.manual_seed(self._job.spec.seed_of(worker, step))
        gradients, _ = self._server.answer(
            worker, step, message.version, values.view(shape), targets, weight
        )
        self.nbytes[Purpose.HEAD_PARAMETERS] += self._head_nbytes
        purpose = Purpose.ACTIVATION_GRADIENTS
        reply = endpoint.message(purpose, step, message.version, gradients)
        self.nbytes[purpose] += reply.nbytes
        return reply

    def _update(self, request: RpcRequest) -> Message:
        """Update all parameters with the gradients of a worker's step; reply with the version."""
        worker, message, step = request.worker, request.message, request.message.step
        endpoint, purpose = self._of_server[worker], Purpose.GRADIENTS
        values = endpoint.values(purpose, message, request.arrived_s, self._num_body)
        losses = self._server.update(worker, step, message.version, values)
        self.nbytes[purpose] += message.nbytes
        self.nbytes[Purpose.HEAD_GRADIENTS] += self._head_nbytes
        self.num_pushed += 1
        self._log.count(losses)
        return Message(Topic.GRADIENTS, step, self._server.version)

    def _merge(self, request: RpcRequest) -> Message | None:
        self._log.count(self.children.update(request.worker, request.message))
        # The reply is that of a fetch: all parameters, once the child hub may begin its next step.
        fetch = Message(Topic.WHOLE_PARAMETERS, request.message.step)
        return self._fetch(replace(request, message=fetch))

    def _begin(self, request: RpcRequest) -> None:
        self._gate.check_layout(request.message)
        self._group.wait(request)

    def _probe(self, request: RpcRequest) -> Message | None:
        reply = self._probes.reply(request.worker, request.message)
        if reply is None:
            self.waiting.append(request)
        return reply

    def _keep_profile(self, request: RpcRequest) -> Message:
        self.profiles[request.worker] = self._gate.profile(request.message)
        self._probes.end(request.worker)
        return _noted(request)

    def _load_buffers(self, request: RpcRequest) -> Message:
        (values,) = tensor_parts.parts_of(request.message, 1)
        if request.worker == self._server.workers.first:
            tensor_parts.load_buffers(self._server.halves.body, values)
        return _noted(request)

    def _finish(self, request: RpcRequest) -> Message:
        worker, message = request.worker, request.message
        is_child = worker in self.children.workers
        trace, report = self._gate.done(worker, message, is_child=is_child)
        self.trace.add(trace)
        if report is not None:
            self.children.reports[worker] = report
        own = self._server.workers.of(worker)
        own.next_step = max(own.next_step, message.step)
        self._group.finish(worker)
        return _noted(request)

    def _fail(self, request: RpcRequest) -> Message:
        (told,) = tensor_parts.parts_of(request.message, 1)
        text = printable(bytes(told).decode(errors="replace"), MOST_TEXT)
        why = f"worker {request.worker} failed: {text}"
        raise InvalidInput.of(why) if request.message.step else WorkerLost(why)


def _noted(request: RpcRequest) -> Message:
    return Message(request.message.topic, request.message.step)
