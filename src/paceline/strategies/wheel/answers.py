"""Answer the requests of workers, each checked by the gate before.

topic                          answered by
parameters                     HeadWorkers.fetch, as soon as no worker is too far behind
activations, gradients         HeadWorkers: the head's half of a step, and its update
whole-parameters, -gradients   ChildHubs: those of hubs that are workers of this one
begin                          WorkerGroup, as soon as the worker may begin
profile, probe, clock          here: workers measure before training
buffers, done                  here: what is kept of a worker
"""

import time
from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import StepDiscarded, printable
from paceline.measure.device_profile import DeviceProfile
from paceline.record.worker_trace import Trace
from paceline.rpc import tensor_parts
from paceline.rpc.frames import Message
from paceline.rpc.limits import MOST_TEXT
from paceline.rpc.probing import ProbeTurns
from paceline.rpc.server import RpcRequest
from paceline.rpc.worker_group import WorkerGroup
from paceline.strategies.wheel.epochs import EpochLog
from paceline.strategies.wheel.gate import Gate, only_part
from paceline.strategies.wheel.heads import HeadWorkers
from paceline.strategies.wheel.job import TrainingJob
from paceline.strategies.wheel.protocol import OF_STEPS, Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB
from paceline.strategies.wheel.tree import ChildHubs

Handler = Callable[[RpcRequest], Message | None]


class WorkerFailed(Exception):
    """A worker has failed, and says why; `by_input` if what it was given is to blame."""

    def __init__(self, why: str, by_input: bool) -> None:
        super().__init__(why)
        self.by_input = by_input


class Answers:
    """Executes requests; an answer of None comes later, when `due` has it or the worker may begin.

    `heads` and `children` do the steps, whose losses `log` counts. `profiles` and `trace` are what
    workers have told.
    """

    def __init__(
        self,
        server: ParameterServer,
        job: TrainingJob,
        group: WorkerGroup,
        log: EpochLog,
        probes: ProbeTurns,
    ) -> None:
        self._server, self._group, self._log, self._probes = server, group, log, probes
        self.heads = HeadWorkers(server, job, log.count)
        self.children = ChildHubs(server, job.spec.num_steps)
        self._gate = Gate(server.workers, job.spec.num_steps, job.layout, lambda: server.version)
        self._held: list[RpcRequest] = []  # fetches of those too far ahead
        self.profiles: dict[int, DeviceProfile] = {}
        self.trace = Trace()

    def end(self) -> None:
        """Add what head workers have recorded to the trace."""
        for endpoint in self.heads.endpoints:
            self.trace.add(endpoint.recorder.trace)

    @property
    def nbytes(self) -> int:
        """The bytes that have travelled between hubs, and between this one and its workers."""
        of_heads = sum(self.heads.nbytes[purpose] for purpose in (*TO_HUB, *FROM_HUB))
        return of_heads + self.children.traffic.nbytes.total()

    def handler(self, request: RpcRequest) -> Handler:
        """Check a request, and return what executes it. Raises InvalidInput if it cannot be."""
        worker, message = request.worker, request.message
        if message.topic in OF_STEPS and worker not in self._server.workers.live:
            # It begins again, and may have parameters that a server which is back has not made.
            return lambda request: Message(Topic.AGAIN, request.message.step)
        handlers: dict[Topic, Handler] = {
            Topic.PARAMETERS: self._fetch,
            Topic.WHOLE_PARAMETERS: self._fetch,
            Topic.WHOLE_GRADIENTS: self._merge,
            Topic.ACTIVATIONS: self.heads.answer,
            Topic.GRADIENTS: self.heads.update,
            Topic.BEGIN: self._begin,
            Topic.PROBE: self._probes.reply,
            Topic.CLOCK: lambda _: Message(Topic.CLOCK, time.monotonic_ns()),
            Topic.PROFILE: self._keep_profile,
            Topic.BUFFERS: self._load_buffers,
            Topic.DONE: self._finish,
            Topic.FAILED: self._fail,
        }
        return handlers[self._gate.check(worker, message)]

    @property
    def waiting(self) -> list[RpcRequest]:
        """The fetches that wait for other workers."""
        return self._held

    def due(self) -> list[RpcRequest]:
        """Return the requests that may be executed now, or wait once more."""
        held, self._held = self._held, []
        return held

    def forget(self, worker: int) -> list[RpcRequest]:
        """Drop what waits of a worker; return the probes of others that waited for it."""
        self._held = [request for request in self._held if request.worker != worker]
        return self._probes.forget(worker)

    def overdue_probes(self) -> list[RpcRequest]:
        """Return the probes that have waited for a worker which makes no use of its turn."""
        slow = self._probes.overdue()
        return [] if slow is None else self._probes.end(slow)

    def begun(self, worker: int, step: int) -> Message:
        """Return the reply that tells a worker which step is its next."""
        below = self._server.workers.of(worker).below
        parts = (tensor_parts.numbers_part(below),) if below else ()
        return Message(Topic.BEGIN, step, parts=parts)

    def _fetch(self, request: RpcRequest) -> Message | None:
        if not self._server.may_begin(request.worker, request.message.step):
            self._held.append(request)
            return None
        if request.message.topic == Topic.WHOLE_PARAMETERS:
            return self.children.fetch(request.worker, request.message)
        return self.heads.fetch(request)

    def _merge(self, request: RpcRequest) -> Message | None:
        worker, message = request.worker, request.message
        is_first = worker == min(self._server.workers.live)
        self._log.count(self.children.update(worker, message, is_first=is_first))
        # The rest of a child hub's request is a fetch.
        fetch = Message(Topic.WHOLE_PARAMETERS, message.step)
        return self._fetch(replace(request, message=fetch))

    def _begin(self, request: RpcRequest) -> None:
        self._gate.check_layout(request.message)
        self._group.wait(request)

    def _keep_profile(self, request: RpcRequest) -> Message:
        self.profiles[request.worker] = self._gate.profile(request.message)
        self._held += self._probes.end(request.worker)
        return _noted(request)

    def _load_buffers(self, request: RpcRequest) -> Message:
        # Nobody knows how to merge running means: one worker's are taken.
        values = only_part(request.message)
        if request.worker == min(self._server.workers.live, default=-1):
            tensor_parts.load_buffers(self._server.halves.body, values)
        return _noted(request)

    def _finish(self, request: RpcRequest) -> Message:
        """Record that a worker has done its steps; one that was dropped begins again."""
        worker, message = request.worker, request.message
        if worker not in self._server.workers.live:
            raise StepDiscarded(f"worker {worker} was dropped before it was done")
        is_child = worker in self.children.workers
        self.trace.add(self._gate.trace(worker, message, is_child=is_child))
        if is_child and (report := self._gate.report(message)) is not None:
            self.children.reports[worker] = report
        self.children.finish(worker, message.step)
        self._group.finish(worker)
        return _noted(request)

    def _fail(self, request: RpcRequest) -> Message:
        text = bytes(only_part(request.message)).decode(errors="replace")
        told = printable(text, MOST_TEXT)
        raise WorkerFailed(f"worker {request.worker} failed: {told}", bool(request.message.step))


def _noted(request: RpcRequest) -> Message:
    return Message(request.message.topic, request.message.step)
