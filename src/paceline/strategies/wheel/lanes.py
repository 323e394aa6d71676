"""A lane: one body worker, which alternates with the others of its device (figure 3).

    lane 0   turn: backward, forward |                                  | turn: backward, forward
             activations ---> hub    | wait ... <--- residuals, params  |
    lane 1                           | turn: backward, forward          |

A turn is the backward of a step and the forward of the next. What a lane waits for comes while the
others have theirs: the parameters of its next step are asked for as soon as residuals are there.
The only lane of a device asks for them when its gradients are in them.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.data.dataset import Batch
from paceline.record.clock import clock_for
from paceline.record.marks import LayerMarks
from paceline.strategies.wheel.coding import buffer_of
from paceline.strategies.wheel.half import BodyHalf
from paceline.strategies.wheel.job import Job, Topic, seed_of
from paceline.strategies.wheel.profile import boot_id, profiled, with_link
from paceline.strategies.wheel.share import SampleShare
from paceline.strategies.wheel.split import Purpose
from paceline.strategies.wheel.trace import Record, Trace, packed
from paceline.strategies.wheel.turns import Turns
from paceline.wire.client import Client
from paceline.wire.messages import Message
from paceline.wire.outbox import HubRestarted, Pending

_PATIENCE_S = 5.0  # in a turn; then the other lanes go on first
_LEAST_PROBE = 64 * 1024  # bytes
_NUM_PINGS = 32


class Refused(InvalidInput):
    """The hub does not let this worker take part, and says why."""


class GivenUp(Exception):
    """The hub has given up the lane's step, and says where it goes on."""


@dataclass(frozen=True)
class Ahead:
    """A forward that waits for its backward: the parameters' version, and what went in and out."""

    version: int
    outputs: Tensor
    answer: Pending


class Lane:
    """One body worker: its connection, its half of the model, its share of the samples."""

    def __init__(
        self,
        worker: int,
        client: Client,
        half: BodyHalf,
        share: SampleShare,
        job: Job,
        turns: Turns,
        loader: Executor,
        say: Callable[[str], None],
    ) -> None:
        self.worker, self.client, self.half = worker, client, half
        self._share, self._job, self._turns = share, job, turns
        self._loader, self._say = loader, say
        self._prefetches = job.config.lanes > 1
        self._step = 0
        self._batch: Future[Batch] | None = None

    def run(self) -> None:
        """Train on the worker's share in all epochs, from where the hub says.

        Raises InvalidInput for what cannot be trained on, WorkerLost if the hub is gone too long.
        """
        while True:
            self._turns.check()
            try:
                self._begin()
                self._train()
                self._turns.leave(self.worker)
                self._finish()
                return
            except HubRestarted:
                self._say(f"worker {self.worker}: the hub has restarted, in step {self._step}")
            except GivenUp:
                self._say(f"worker {self.worker}: the hub gave up step {self._step}; once more")
            self._turns.leave(self.worker)  # the others have to get through to the hub, too
            self.half.forget()

    def tell(self, topic: Topic, *parts: memoryview, step: int = 0) -> Message:
        """Send a request and return its reply."""
        return self._result(self.client.request(Message(topic.value, step, parts=parts)))

    def profile(self) -> None:
        """Measure the body and the way to the hub, before the first step, and tell the hub."""
        job, half, share = self._job, self.half, self._share
        clock = clock_for(half.device)
        marks = LayerMarks(half.layers, clock)
        trace = Trace(self.worker, half.name, marks, clock, range(2**31))
        state = [buffer.clone() for buffer in half.body.buffers()]

        def round_of(number: int) -> None:
            with trace.work(number, Kind.LOAD):
                inputs = share.batch(number % share.num_steps)[0].to(half.device)
            with trace.layers(number, Kind.FORWARD):
                outputs = half.body(inputs)
            residuals = torch.randn_like(outputs)
            with trace.layers(number, Kind.BACKWARD):
                torch.autograd.backward(outputs, residuals)
            half.forget()

        found = profiled(half.device, job.config, round_of, trace.record.spans, job.profile_s)
        for buffer, before in zip(half.body.buffers(), state, strict=True):
            buffer.copy_(before)

        def ask(up: int, down: int) -> None:
            self.tell(Topic.PROBE, memoryview(bytes(up)), step=down)

        found = with_link(found, ask, max(half.nbytes, _LEAST_PROBE))
        self.tell(Topic.PROFILE, memoryview(found.model_dump_json().encode()))

    def _finish(self) -> None:
        """Hand over what was traced, by the hub's clock."""
        record = Record()
        record.add(self.half.trace.record, self._ahead_s())
        self.tell(Topic.DONE, memoryview(packed(record)))

    def _ahead_s(self) -> float:
        """Return how far this clock is ahead of the hub's: by the fastest of some round trips."""
        if boot_id() == self._job.boot_id:
            return 0.0
        best_s, ahead_s = inf, 0.0
        for _ in range(_NUM_PINGS):
            sent_s = time.monotonic()
            there_s = self.tell(Topic.CLOCK).step * 1e-9
            back_s = time.monotonic()
            if back_s - sent_s < best_s:
                best_s, ahead_s = back_s - sent_s, (sent_s + back_s) / 2 - there_s
        return ahead_s

    def _begin(self) -> None:
        layout = memoryview(self.half.layout.encode())
        self._step = self.tell(Topic.BEGIN, layout, step=self._step).step
        self._batch = self._load(self._step)

    def _train(self) -> None:
        if self._step >= self._share.num_steps:
            return
        first = self._fetch()
        with self._turns.of(self.worker):
            ahead = self._forward(first)
        pushed: Pending | None = None
        while True:
            residuals = self._result(ahead.answer)
            self.half.trace.comes(self._step, Purpose.RESIDUALS, ahead.answer.arrived_s)
            entered = self.half.take_residuals(self._step, residuals)
            if pushed is not None:
                self._result(pushed)
            is_last = self._step + 1 == self._share.num_steps
            early = self._fetch(1) if self._prefetches and not is_last else None
            with self._turns.of(self.worker):
                pushed = self._backward(ahead, residuals.codec, entered)
                if not self._prefetches or is_last:
                    self._result(pushed)
                    pushed = None
                self._step += 1
                if is_last:
                    return
                ahead = self._forward(early or self._fetch())

    def _fetch(self, later: int = 0) -> Pending:
        """Ask for the parameters of the step, or of a later one."""
        return self.client.request(Message(Topic.PARAMETERS.value, self._step + later))

    def _forward(self, fetch: Pending) -> Ahead:
        """Take parameters and samples, and send what the body makes of them, in the lane's turn."""
        step, half = self._step, self.half
        while not fetch.wait(_PATIENCE_S) and len(self._job.workers_beside(self.worker)) > 1:
            self._turns.let_others(self.worker)
        reply = self._result(fetch)
        half.trace.comes(step, Purpose.BODY_PARAMETERS, fetch.arrived_s)
        half.take_parameters(step, reply)
        with half.trace.work(step, Kind.LOAD):
            assert self._batch is not None
            inputs, targets = self._batch.result()
            inputs = inputs.to(half.device)
        torch.manual_seed(seed_of(self._job.seed, self._job.part(self.worker), step))
        with half.trace.layers(step, Kind.FORWARD):
            outputs = half.body(inputs)
        if self._share.ends_epoch(step) and (buffers := half.buffers()) is not None:
            self.tell(Topic.BUFFERS, buffers, step=step)
        parts = half.activations(step, outputs)
        labels = buffer_of(targets.to(torch.int32))
        weight = buffer_of(torch.tensor(self._share.weight(step), dtype=torch.float64))
        message = Message(
            Topic.ACTIVATIONS.value,
            step,
            reply.version,
            half.port.codec(Purpose.ACTIVATIONS),
            (labels, weight, *parts),
        )
        half.trace.leaves(step, Purpose.LABELS)
        half.trace.leaves(step, Purpose.ACTIVATIONS)
        answer = self.client.request(message)
        self._batch = self._load(step + 1)
        return Ahead(reply.version, outputs, answer)

    def _backward(self, ahead: Ahead, codec: str, entered: tuple[Tensor, ...]) -> Pending:
        """Compute the body's gradients and send them, in the lane's turn."""
        step, half = self._step, self.half
        residuals = half.residuals(step, codec, entered, ahead.outputs)
        with half.trace.layers(step, Kind.BACKWARD):
            torch.autograd.backward(ahead.outputs, residuals)
        parts = half.gradients(step)
        name = half.port.codec(Purpose.BODY_GRADIENTS)
        half.trace.leaves(step, Purpose.BODY_GRADIENTS)
        message = Message(Topic.GRADIENTS.value, step, ahead.version, name, parts)
        return self.client.request(message)

    def _load(self, step: int) -> Future[Batch] | None:
        """Have the samples of a step read while the device computes."""
        if step >= self._share.num_steps:
            return None
        return self._loader.submit(self._share.batch, step)

    def _result(self, pending: Pending) -> Message:
        """Return the reply; GivenUp, InvalidInput or WorkerLost if it is none."""
        while not pending.wait(1.0):
            self._turns.check()
        reply = pending.result()
        if reply.topic == Topic.AGAIN:
            raise GivenUp
        if reply.topic == Topic.REFUSED:
            raise Refused(bytes(reply.parts[0]).decode(errors="replace"))
        return reply
