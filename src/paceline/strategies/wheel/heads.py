"""Head workers: they answer body workers at the hub, beside its parameter server."""

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod

import torch

from paceline.core.errors import InvalidInput
from paceline.core.wire_format import Purpose
from paceline.links.clock import clock_for
from paceline.links.devices import device_of
from paceline.measure.profiled_machine import device_name
from paceline.record.recorder import LayerMarks
from paceline.record.worker_trace import WorkerRecorder
from paceline.rpc import tensor_parts
from paceline.rpc.endpoint import CopyLane, Endpoint
from paceline.rpc.frames import Message
from paceline.rpc.server import RpcRequest
from paceline.strategies.wheel import protocol
from paceline.strategies.wheel.job import TrainingJob, layers_in
from paceline.strategies.wheel.lent import COPIES
from paceline.strategies.wheel.protocol import Topic
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.staleness import LossSum


class HeadWorkers:
    """Head workers, one for each body worker: they answer at the hub, beside its server.

    All run in the hub's thread, one request at a time; they share the server's memory. `nbytes`
    counts the bytes of messages by the seven purposes of figure 2, `num_pushed` the messages with
    gradients of the body. `count` is called with the losses of an update, by epoch.
    """

    def __init__(
        self,
        server: ParameterServer,
        job: TrainingJob,
        count: Callable[[Mapping[int, LossSum]], None],
    ) -> None:
        self._server, self._batches, self._count = server, job.batches, count
        halves, device, spec = server.halves, job.device, job.spec
        self._spec = spec
        self._crossing, self._steps_per_epoch = halves.crossing, job.steps_per_epoch
        self._num_body = sum(parameter.numel() for parameter in halves.body_parameters)
        self._head_nbytes = sum(parameter.nbytes for parameter in halves.head_parameters)
        dtype, clock = halves.body_parameters[0].dtype, clock_for(device)
        marks = LayerMarks(layers_in(server.answering_model, halves.head_names), clock)
        name = device_name(device_of(device).kind, 0)
        recorders = [
            WorkerRecorder(worker, name, marks, clock, spec.traced)
            for worker in range(spec.config.workers)
        ]
        copies = CopyLane(device)
        self.endpoints = self._of_server = [
            Endpoint(spec.config.codecs, dtype, one, copies) for one in recorders
        ]
        if job.kept_on != device:
            # The body's parameters and gradients never are on the device of a head that is lent.
            in_memory = CopyLane(job.kept_on)
            self._of_server = [
                Endpoint(spec.config.codecs, dtype, one, in_memory) for one in recorders
            ]
        self.nbytes: Counter[Purpose] = Counter()
        self.num_pushed = 0
        server.watch = lambda worker, step, kind: recorders[worker].work(
            step, kind, *COPIES.get(kind, ())
        )

    def fetch(self, request: RpcRequest) -> Message:
        """Return the body's parameters as they are now."""
        version, values = self._server.body_parameters()
        endpoint = self._of_server[request.worker]
        reply = endpoint.message(Purpose.PARAMETERS, request.message.step, version, values)
        self.nbytes[Purpose.PARAMETERS] += reply.nbytes
        return reply

    def answer(self, request: RpcRequest) -> Message:
        """Return the activation gradients of activations that have come.

        Raises InvalidInput if they do not fit the model, NonFinite if the loss is not finite.
        """
        worker, message, at_s = request.worker, request.message, request.arrived_s
        endpoint, step = self.endpoints[worker], message.step
        batches, parts = self._batches, tensor_parts.parts_of(message)
        if len(parts) <= 1 + batches.num_parts:
            raise InvalidInput("activations", f"{len(parts)} parts")
        count, weight = protocol.share_of(parts[0])
        of_targets, rest = parts[1 : 1 + batches.num_parts], parts[1 + batches.num_parts :]
        for purpose in (Purpose.LABELS, Purpose.ACTIVATIONS):
            endpoint.recorder.received(step, purpose, at_s)
        batches.check_parts(of_targets, count)
        targets = batches.targets(endpoint.to_device(step, Purpose.LABELS, of_targets), count)
        buffers = endpoint.to_device(step, Purpose.ACTIVATIONS, rest)
        num_values = count * prod(self._crossing)
        values = endpoint.decode(step, Purpose.ACTIVATIONS, message.codec, buffers, num_values)
        self.nbytes[Purpose.LABELS] += sum(part.nbytes for part in of_targets)
        self.nbytes[Purpose.ACTIVATIONS] += sum(part.nbytes for part in rest)
        torch.manual_seed(self._spec.seed_of(worker, step))
        gradients, _ = self._server.answer(
            worker, step, message.version, values.view(count, *self._crossing), targets, weight
        )
        self.nbytes[Purpose.HEAD_PARAMETERS] += self._head_nbytes
        purpose = Purpose.ACTIVATION_GRADIENTS
        reply = endpoint.message(purpose, step, message.version, gradients)
        self.nbytes[purpose] += reply.nbytes
        return reply

    def update(self, request: RpcRequest) -> Message:
        """Update all parameters with the body's gradients.

        Raises StepDiscarded if the step was given up; InvalidInput and NonFinite as by `answer`.
        """
        worker, message, step = request.worker, request.message, request.message.step
        endpoint, half = self._of_server[worker], self._server.workers.of(worker).half
        values = endpoint.values(Purpose.GRADIENTS, message, request.arrived_s, self._num_body)
        version = self._server.update(worker, step, message.version, values)
        assert half is not None  # or the step was discarded
        self.nbytes[Purpose.GRADIENTS] += message.nbytes
        self.nbytes[Purpose.HEAD_GRADIENTS] += self._head_nbytes
        self.num_pushed += 1
        self._count({step // self._steps_per_epoch: half.loss})
        return Message(Topic.GRADIENTS, step, version)
