"""The head workers: they answer body workers at the hub, beside the parameter server.

All run in the hub's thread, one request at a time; what they exchange with the server is its own
memory. Each reply is counted by the seven purposes of figure 2.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from math import prod

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.record.clock import clock_for
from paceline.record.marks import LayerMarks
from paceline.strategies.wheel.coding import parts_of, values_of
from paceline.strategies.wheel.half import coders_of, layers_in
from paceline.strategies.wheel.job import Job, Topic, seed_of
from paceline.strategies.wheel.port import Port
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.split import FROM_HUB, LABEL_NBYTES, TO_HUB, Purpose
from paceline.strategies.wheel.tally import Learnt
from paceline.strategies.wheel.trace import Record, Trace
from paceline.wire.messages import Message

_NUM_BEFORE = 2  # parts of a message before its activations: labels and weight


class HeadWorkers:
    """One head worker for each body worker.

    `name` is what plans call the hub's device; no message is larger than `largest_nbytes`.
    """

    def __init__(
        self,
        server: ParameterServer,
        job: Job,
        device: torch.device,
        name: str,
        largest_nbytes: int,
    ) -> None:
        self._server, self._job = server, job
        self._largest_nbytes = largest_nbytes
        halves = server.halves
        self._crossing = halves.crossing
        self._num_body = sum(parameter.numel() for parameter in halves.body_parameters)
        self._head_nbytes = _nbytes(halves.head_parameters)
        self._dtype = halves.head_parameters[0].dtype
        clock = clock_for(device)
        self.layers = layers_in(server.model, halves.head_names)
        marks = LayerMarks(self.layers, clock)
        workers = range(job.config.workers)
        traces = [Trace(worker, name, marks, clock, job.traced) for worker in workers]
        self._ports = [Port(coders_of(job, self._dtype), trace, device) for trace in traces]
        self._waiting: dict[int, Learnt] = {}
        self.nbytes: Counter[Purpose] = Counter()
        server.watch = self._watch

    @property
    def travelled(self) -> int:
        """Bytes that went to and from the hub so far."""
        return sum(self.nbytes[purpose] for purpose in (*TO_HUB, *FROM_HUB))

    def filling(self, nbytes: int) -> memoryview:
        """Return so many bytes of no meaning; InvalidInput if no message is as large."""
        if not 0 <= nbytes <= self._largest_nbytes:
            raise InvalidInput(f"{nbytes:,} bytes to try; at most {self._largest_nbytes:,}")
        return memoryview(bytes(nbytes))

    def record(self) -> Record:
        """Return what all of them have traced."""
        whole = Record()
        for port in self._ports:
            whole.add(port.trace.record)
        return whole

    def fetch(self, worker: int, message: Message) -> Message:
        """Return the body's parameters as they are now."""
        port, step = self._ports[worker], message.step
        version, values = self._server.body_parameters()
        parts = port.leave(step, Purpose.BODY_PARAMETERS, values)
        self.nbytes[Purpose.BODY_PARAMETERS] += _total(parts)
        port.trace.leaves(step, Purpose.BODY_PARAMETERS)
        codec = port.codec(Purpose.BODY_PARAMETERS)
        return Message(Topic.PARAMETERS.value, step, version, codec, parts)

    def answer(self, worker: int, message: Message, at_s: float) -> Message:
        """Return the residuals of activations that came at a time.

        InvalidInput if they do not fit the model, NonFinite if the loss is not finite.
        """
        port, step = self._ports[worker], message.step
        if len(message.parts) <= _NUM_BEFORE:
            raise InvalidInput(f"activations: {len(message.parts)} parts")
        first, second, *rest = parts_of(message)
        for purpose in (Purpose.LABELS, Purpose.ACTIVATIONS):
            port.trace.comes(step, purpose, at_s)
        count = first.nbytes // LABEL_NBYTES
        labels = self._labels(port, step, first, count)
        weight = float(values_of(second, torch.float64, 1))
        entered = port.enter(step, Purpose.ACTIVATIONS, tuple(rest))
        num_values = count * prod(self._crossing)
        values = port.decode(step, Purpose.ACTIVATIONS, message.codec, entered, num_values)
        self.nbytes[Purpose.LABELS] += first.nbytes
        self.nbytes[Purpose.ACTIVATIONS] += _total(rest)
        torch.manual_seed(seed_of(self._job.seed, self._job.part(worker), step))
        residuals, loss = self._server.answer(
            worker, step, message.version, values.view(count, *self._crossing), labels, weight
        )
        self._waiting[worker] = Learnt(count, loss / weight * count)
        self.nbytes[Purpose.HEAD_PARAMETERS] += self._head_nbytes
        parts = port.leave(step, Purpose.RESIDUALS, residuals)
        self.nbytes[Purpose.RESIDUALS] += _total(parts)
        port.trace.leaves(step, Purpose.RESIDUALS)
        codec = port.codec(Purpose.RESIDUALS)
        return Message(Topic.RESIDUALS.value, step, message.version, codec, parts)

    def update(self, worker: int, message: Message, at_s: float) -> tuple[Message, Learnt | None]:
        """Update all parameters with gradients that came at a time; say what was learnt.

        StepDiscarded if the step was given up; InvalidInput and NonFinite as by `answer`.
        """
        port, step = self._ports[worker], message.step
        port.trace.comes(step, Purpose.BODY_GRADIENTS, at_s)
        parts = parts_of(message)
        entered = port.enter(step, Purpose.BODY_GRADIENTS, parts)
        values = port.decode(step, Purpose.BODY_GRADIENTS, message.codec, entered, self._num_body)
        before = self._server.next_step(worker)
        version = self._server.update(worker, step, message.version, values)
        self.nbytes[Purpose.BODY_GRADIENTS] += _total(parts)
        learnt = None
        if self._server.next_step(worker) > before:
            learnt = self._waiting.pop(worker, None)
            self.nbytes[Purpose.HEAD_GRADIENTS] += self._head_nbytes
        return Message(Topic.GRADIENTS.value, step, version), learnt

    def _labels(self, port: Port, step: int, part: memoryview, count: int) -> Tensor:
        if part.nbytes != count * LABEL_NBYTES:
            raise InvalidInput(f"labels: {part.nbytes} bytes are no 32-bit integers")
        (entered,) = port.enter(step, Purpose.LABELS, (part,))
        return entered.view(torch.int32).long()

    def _watch(self, worker: int, step: int, kind: Kind) -> AbstractContextManager[None]:
        trace = self._ports[worker].trace
        return trace.work(step, kind) if kind is Kind.STEP else trace.layers(step, kind)


def _total(parts: Iterable[memoryview]) -> int:
    return sum(part.nbytes for part in parts)


def _nbytes(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
