"""Run the workers of one device, which train the first layers (the body) of the model.

    worker 0   backward, forward     |                                  | backward, forward
               activations ---> hub  | wait ... <--- act. grads, params |
    worker 1                         | backward, forward                |

The workers of a device alternate (figure 3 of Du et al. 2017). In its turn, a worker computes the
backward pass of a step and the forward pass of the next step; then this worker waits for the hub
while other workers compute. A worker requests the parameters of its next step as soon as its
activation gradients arrive. A device's only worker requests the parameters after its update
instead.

A hub starts such a process for each device of its machine; on other machines, the user starts
`paceline worker`.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.errors import InvalidInput
from paceline.core.plan import Kind
from paceline.core.wire_format import Purpose
from paceline.links.clock import clock_for
from paceline.links.devices import device_named, device_of, first_device
from paceline.links.failpoints import reach
from paceline.links.group import boot_id
from paceline.links.turns import Turns
from paceline.measure.device_profile import device_name, profile_device
from paceline.record.merge import lead_of
from paceline.record.recorder import LayerMarks
from paceline.record.worker_trace import ALL_STEPS, Trace, WorkerRecorder
from paceline.rpc import tensor_parts
from paceline.rpc.batch_layout import BatchLayout
from paceline.rpc.client import Client, HubRestarted, ReplyFuture
from paceline.rpc.connecting import WorkerProcessSettings
from paceline.rpc.frames import Message
from paceline.rpc.tensor_parts import CopyLane, Endpoint
from paceline.rpc.workers import check_reply, listed, retry_after_restart, run_as_process
from paceline.strategies.wheel import job, protocol
from paceline.strategies.wheel.config import RunSpec
from paceline.strategies.wheel.protocol import Topic
from paceline.training.data.batch import Batch, SampleShare
from paceline.training.models.halves import values_restored
from paceline.training.recipes.recipe import Recipe

logger = logging.getLogger("paceline.worker")  # not __name__, which may be __main__
_POLL_S = 1.0
_PATIENCE_S = 5.0  # longest wait for parameters before a worker lets other workers compute
_MIN_PROBE_NBYTES = 64 * 1024


class Forward(NamedTuple):
    """The result of a forward pass; `answer`: future of the reply (activation gradients)."""

    version: int
    outputs: Tensor
    answer: ReplyFuture


class BodyWorker:
    """Trains the model's first layers (the body) on a worker's share of the samples."""

    def __init__(
        self,
        worker: int,
        client: Client,
        spec: RunSpec,
        recipe: Recipe,
        copies: CopyLane,
        turns: Turns,
        loader: Executor,
    ) -> None:
        self.worker, self._client, self._spec = worker, client, spec
        device = self.device = copies.device.torch_device
        self._turns, self._loader = turns, loader
        self._prefetches = spec.config.lanes > 1
        own = spec.batch_size, spec.part(worker), spec.num_parts, spec.num_steps, spec.seed
        self._share, self._batches = SampleShare(recipe.samples, *own), BatchLayout(recipe)
        self._learning = job.learning_in(spec, recipe)
        model, self._halves = job.model_and_halves(spec, recipe, torch.device("cpu"))
        self._body = self._halves.body.to(device)
        self._parameters = self._halves.body_parameters
        self._num_values = sum(parameter.numel() for parameter in self._parameters)
        self._layout = job.layout_of(spec, self._halves, recipe, self._batches)
        self._layers = job.layers_in(model, self._halves.body_names)
        self._recorder = self._new_recorder(spec.traced)
        dtype = self._parameters[0].dtype
        self._endpoint = Endpoint(spec.config.codecs, dtype, self._recorder, copies)
        self._step = 0
        self._batch: Future[Batch] | None = None

    def run(self) -> None:
        """Train on the worker's share of each step, from the step that the hub names."""
        while True:
            self._turns.check()
            try:
                layout = memoryview(self._layout.encode())
                self._step = self._ask(Topic.BEGIN, layout, step=self._step).step
                self._batch = self._load(self._step)
                self._train()
                self._turns.leave(self.worker)
                trace, lead_s = Trace(), 0.0
                if boot_id() != self._spec.boot_id:  # the hub's machine has another clock
                    lead_s = -lead_of(lambda: self._ask(Topic.CLOCK).step * 1e-9).ahead_s
                trace.add(self._recorder.trace, lead_s)
                self._ask(Topic.DONE, memoryview(trace.as_json()))
                return
            except HubRestarted as error:
                logger.info("worker %d, step %d: %s", self.worker, self._step, error)
            # Let this device's other workers take their turns now, because the hub waits until all
            # workers have sent BEGIN.
            self._turns.leave(self.worker)
            self._body.zero_grad()

    def profile(self) -> None:
        """Measure the first layers and the link to the hub, and send the profile to the hub."""
        spec, device, share = self._spec, self.device, self._share
        recorder = self._new_recorder()

        def run_step(number: int) -> None:
            with recorder.work(number, Kind.LOAD):
                inputs = self._inputs(self._batches.check(share.batch(number % share.num_steps)))
            with recorder.work(number, Kind.FORWARD):
                outputs = job.activations_of(self._halves, inputs, self._learning)
            activation_gradients = torch.randn_like(outputs)
            with recorder.work(number, Kind.BACKWARD):
                torch.autograd.backward(outputs, activation_gradients)
            self._body.zero_grad()

        def exchange(up: int, down: int) -> None:
            self._ask(Topic.PROBE, memoryview(bytes(up)), step=down)

        spans = recorder.trace.spans
        with values_restored(self._body.buffers()):
            reach("worker.profiling", worker=self.worker)
            found = profile_device(
                device, spec.config.codecs.values(), run_step, spans, spec.profile_s
            )
        nbytes = sum(parameter.nbytes for parameter in self._parameters)
        profile = found.with_link(exchange, max(nbytes, _MIN_PROBE_NBYTES))
        self._ask(Topic.PROFILE, memoryview(profile.model_dump_json().encode()))

    def _new_recorder(self, window: range = ALL_STEPS) -> WorkerRecorder:
        """Return a recorder of the body's layers, with the name that plans use for the device."""
        marks = LayerMarks(self._layers, clock_for(self.device))
        number = 1 + self.worker // self._spec.config.lanes
        name = device_name(device_of(self.device).kind, number)
        return WorkerRecorder(self.worker, name, marks, window)

    def _train(self) -> None:
        if self._step >= self._share.num_steps:
            return
        purpose = Purpose.ACTIVATION_GRADIENTS
        first = self._fetch(self._step)
        with self._turns.of(self.worker):
            forward = self._forward(first)
        pushed: ReplyFuture | None = None
        while True:
            reply = self._result(forward.answer)
            self._recorder.received(self._step, purpose, forward.answer.arrived_s)
            # Copy before this worker's turn, while another worker computes on the device.
            buffers = self._endpoint.to_device(self._step, purpose, tensor_parts.parts_of(reply))
            if pushed is not None:
                self._result(pushed)
            is_last = self._step + 1 == self._share.num_steps
            early = self._fetch(self._step + 1) if self._prefetches and not is_last else None
            with self._turns.of(self.worker):
                pushed = self._backward(forward, buffers)
                if not self._prefetches or is_last:
                    self._result(pushed)
                    pushed = None
                self._step += 1
                if is_last:
                    return
                forward = self._forward(early or self._fetch(self._step))

    def _fetch(self, step: int) -> ReplyFuture:
        return self._client.request(Message(Topic.PARAMETERS, step))

    def _forward(self, fetch: ReplyFuture) -> Forward:
        """Run the body's forward pass, and send the activations to the hub."""
        step, recorder, endpoint = self._step, self._recorder, self._endpoint
        while not fetch.wait(_PATIENCE_S) and self._prefetches:
            self._turns.let_others(self.worker)
        reply = self._result(fetch)
        values = endpoint.values(Purpose.PARAMETERS, reply, fetch.arrived_s, self._num_values)
        # Use views of the reply's memory as parameters, to avoid a copy.
        parts = tensor_parts.views(values, self._parameters)
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.data = part
        with recorder.work(step, Kind.LOAD):
            assert self._batch is not None
            batch = self._batch.result()
            inputs = self._inputs(batch)
        torch.manual_seed(self._spec.seed_of(self.worker, step))
        with recorder.work(step, Kind.FORWARD):
            outputs = job.activations_of(self._halves, inputs, self._learning)
        if self._share.ends_epoch(step) and (buffers := tensor_parts.buffers_of(self._body)).nbytes:
            self._ask(Topic.BUFFERS, buffers, step=step)
        before = self._batches.parts(batch)
        message = endpoint.message(Purpose.ACTIVATIONS, step, reply.version, outputs, before)
        recorder.sends(step, Purpose.LABELS)
        answer = self._client.request(message)
        self._batch = self._load(step + 1)
        return Forward(reply.version, outputs, answer)

    def _backward(self, forward: Forward, buffers: Sequence[Tensor]) -> ReplyFuture:
        """Run the body's backward pass, and send the gradients to the hub.

        `buffers`: the encoded activation gradients, on the device.
        """
        step, outputs, purpose = self._step, forward.outputs, Purpose.ACTIVATION_GRADIENTS
        values = self._endpoint.decode(step, purpose, buffers, outputs.numel())
        with self._recorder.work(step, Kind.BACKWARD):
            torch.autograd.backward(outputs, values.view(outputs.shape))
        gradients = protocol.take_gradients(self._halves.body_names, self._parameters)
        vector = tensor_parts.flatten(gradients)
        message = self._endpoint.message(Purpose.GRADIENTS, step, forward.version, vector)
        pushed = self._client.request(message)
        reach("worker.pushed", worker=self.worker, step=step)
        return pushed

    def _inputs(self, batch: Batch) -> Any:
        return Batch(batch.inputs, ()).to(self.device).inputs

    def _load(self, step: int) -> Future[Batch] | None:
        """Read the samples of a step in another thread, while the device computes."""
        if step >= self._share.num_steps:
            return None
        return self._loader.submit(lambda: self._batches.check(self._share.batch(step)))

    def _ask(self, topic: Topic, *parts: memoryview, step: int = 0) -> Message:
        return self._result(self._client.request(Message(topic.value, step, parts=parts)))

    def _result(self, pending: ReplyFuture) -> Message:
        """Wait for a reply, and return it; raises WorkerRefused, HubRestarted or WorkerLost."""
        while not pending.wait(_POLL_S):
            self._turns.check()
        return check_reply(pending.result())


def take_part(settings: WorkerProcessSettings, clients: Mapping[int, Client]) -> None:
    """Train the connected workers until the run ends; InvalidInput for wrong worker numbers."""
    workers = settings.numbers
    spec = RunSpec.from_json(clients[workers[0]].settings)
    lanes = spec.config.lanes
    expected = tuple(spec.config.workers_by_device[1 + workers[0] // lanes])
    if workers != expected:
        problem = f"must be {listed(expected)}: with lanes={lanes}, these share a device"
        raise InvalidInput("workers", problem, got=listed(workers))
    device = first_device() if settings.device is None else device_named(settings.device)
    if spec.pace is not None:  # in a rehearsal, layers sleep instead of computing
        device = torch.device("cpu")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    recipe, turns = job.recipe_in(spec), Turns(workers)
    with device_of(device).use(), ThreadPoolExecutor(1, "paceline-load") as loader:
        copies = CopyLane(device)
        bodies = [
            BodyWorker(worker, client, spec, recipe, copies, turns, loader)
            for worker, client in clients.items()
        ]
        if spec.profile_s:
            retry_after_restart(bodies[0].profile)
        turns.run({body.worker: body.run for body in bodies}, device_of(device))


def main() -> None:
    """Run workers with the JSON settings in `sys.argv[1]`; forked processes call this, too."""
    run_as_process(take_part, WorkerProcessSettings)


if __name__ == "__main__":
    main()
