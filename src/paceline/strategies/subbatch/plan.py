"""Plan sub-batches through a split head (Dettmers 2016, sections 2.4 and 5.1.2).

    worker0 compute   load body's forward | head 0 | head 1 | ... | body's backward       |  step
    exchange                      [gather 0][gather 1] [return 0] [return P-1] [layer 2][layer 1]

Each worker runs the body on a separate batch. The step has P sub-batches, numbered 0 to P-1. For
each of them, all workers gather 1/P of the activations of all bodies, run the head together, and
return the activation gradients (`return 0`); meanwhile, they gather the next sub-batch. After the
last sub-batch, workers run the backward pass of the body, and average the gradients of its layers,
here 2 and 1, layer by layer. Workers
never send the head's parameter gradients. With `updates="sub-batch"`, a layer of the head is
updated before it computes the next sub-batch.

A sub-batch in a head of two layers:

    worker0 compute        [fc1][fc2]        | [fc2 input][fc2 weight][fc1 input][fc1 weight]
    exchange        [send 1]  [send 2] [loss]             [reduce 2]               [reduce 1]

The head's layers are split by their outputs: each worker computes some outputs of every layer. A
linear layer's inputs are gathered from all workers. The gradients of these inputs are summed over
workers, and each worker receives the sums for the inputs that it sent. For the loss, workers
exchange three values per row of their logits. A row is a sample or, in a language model, a token.
During the body's forward, workers exchange all targets.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.balance import evenly
from paceline.core.collective import Coding, Collective, CollectivePiece
from paceline.core.cost import compute_lane
from paceline.core.cutting import Split
from paceline.core.machine import Device, Machine
from paceline.core.plan import Cost, Kind, Plan, Task, TaskId
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.wire_format import Purpose
from paceline.core.workload import Layer, Workload, kept_nbytes, replica_nbytes, state_nbytes
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import (
    LayerWork,
    cut,
    layer_work,
    matrix_of,
    num_outputs,
    rows_per_sample,
    update_work,
)

LOSS, LABELS = "loss", "labels"  # names (`Task.part`) of the exchanges of loss terms and targets
_LOSS_VALUES = 3  # values per row: largest logit, sum of exponentials, target's logit
# A target has 8 bytes. A message's header has two numbers of 8 bytes: its samples and rows.
_LABEL_NBYTES, _LABELS_HEADER = 8, 2 * 8
# Codecs of the body's gradients accept 2 bytes per value (float16, bfloat16) or 4 (float32).
_GRADIENTS = (2, 4)
_FLOAT32 = (4,)  # codecs of activations and their gradients accept only 4 bytes per value


def weights_of(layer: str) -> str:
    """Return the `Task.part` of the task that computes a layer's weight gradients."""
    return f"{layer}:weights"


def returned_of(layer: str) -> str:
    """Return the `Task.part` of the exchange that sums a layer's input gradients."""
    return f"{layer}:{Purpose.ACTIVATION_GRADIENTS}"


def plan(workload: Workload, machine: Machine, config: SubBatch, window: Window) -> Plan:
    """Plan `window.num_steps` steps on the first `config.workers` devices.

    Raises InvalidInput if the model cannot be split, or the machine lacks a device, link or speed.
    """
    devices, workers = machine.first_devices(config.workers), config.workers
    parts = cut(workload, config.head, workers)
    compute = ComputeStep(parts.body, devices)
    update, ring, gradients = compute.update, None, dict[str, Collective]()
    if config.updates == "step":
        updates = (update_work(layer, _share(layer, workers)) for layer in parts.head.layers)
        update = sum(updates, update)
    if workers > 1:
        ring = Ring.over(machine, devices, [compute_lane(device.name) for device in devices])
        stations, layers = dict(enumerate(devices)), parts.body.layers
        coding = Coding.of(config.gradients, stations, layers, _GRADIENTS)
        for layer in parts.body.in_backward_order:
            if layer.parameters:
                # Without a codec, a message also has a flag for each parameter: whether this worker
                # has changed the parameter's gradient.
                flags = [] if coding else [one.element_size for one in layer.parameters]
                size = layer.gradient_nbytes + sum(flags), layer.num_parameters
                gradients[layer.name] = Collective.over(
                    ring, Kind.REDUCE, layer.name, *size, coding
                )
    passes = tuple(_sub_batches(parts, devices, config, ring))
    num_rows = workload.batch_size * rows_per_sample(parts)
    nbytes = _LABELS_HEADER + num_rows * _LABEL_NBYTES
    labels = _exchange(ring, workers, None, Kind.SEND, LABELS, nbytes, None, 1)
    step_tasks = partial(_step_tasks, compute, passes, labels, gradients, update)
    return Plan.of_steps(step_tasks, window.num_steps)


def memory(workload: Workload, machine: Machine, config: SubBatch) -> Mapping[str, int]:
    """Return the bytes that each device needs, by name.

    A device stores a replica of the body, its part of the head, and the gathered inputs of the
    head's layers. It stores the inputs of all sub-batches, or of two if each sub-batch updates the
    head.
    """
    devices = machine.first_devices(config.workers)
    parts = cut(workload, config.head, config.workers)
    body, head, workers = parts.body, parts.head.layers, config.workers
    # For the head's backward pass, a device keeps the inputs of linear layers and its own logits.
    own_outputs = head[-1].activation_nbytes * _share(head[-1], workers)
    features = own_outputs
    for before, layer in zip([body.layers[-1], *head], head, strict=False):
        features += before.activation_nbytes if matrix_of(layer) is not None else 0
    num_passes = config.num_sub_batches(body.batch_size)
    # A sub-batch has `of_one` times as many samples (of all workers) as a worker's batch.
    of_one = workers * -(-body.batch_size // num_passes) / body.batch_size
    kept = min(workers, 2 * of_one) if config.updates == "sub-batch" else workers
    # While the head runs, there are logit gradients of a sub-batch, but no gradients of the body.
    in_head = state_nbytes(body.layers) - body.gradient_nbytes + kept_nbytes(body.layers)
    in_head += round(features * kept + own_outputs * of_one) + body.input_nbytes
    needed = {device.name: max(in_head, replica_nbytes(body)) for device in devices}
    for layer in head:
        outputs = num_outputs(layer)
        # On a cluster, `devices` may be those of the first node only. Their shares are the largest,
        # so the other nodes' shares do not matter.
        for device, own in zip(devices, evenly(outputs, workers), strict=False):
            needed[device.name] += state_nbytes([layer]) * own // outputs
    return needed


def sizes(workload: Workload, config: SubBatch) -> Iterator[SubBatch]:
    """Yield the configurations that the planner compares, which differ in the sub-batch's size.

    Yields variants with 1, 2, 4, ... sub-batches per step while these are fewer than in `config`.
    Then yields `config` itself. If the user has set `sub_batch`, yields only `config`.
    """
    most, own = workload.batch_size * config.workers, config.num_sub_batches(workload.batch_size)
    num_passes = 1
    while config.sub_batch is None and num_passes < own:
        yield replace(config, sub_batch=-(-most // num_passes))
        num_passes *= 2
    yield config


@dataclass(frozen=True)
class _LayerPass:
    """A worker's work for a layer in one sub-batch, and the layer's exchanges.

    `gathered`: the all-gather of the inputs. `returned`: the reduce-scatter of their gradients.
    """

    layer: str
    work: LayerWork
    gathered: Collective | None
    returned: Collective | None


@dataclass(frozen=True)
class _SubBatchPlan:
    """Makes the tasks of one sub-batch in the head.

    `waits`: whether a layer waits until the previous sub-batch has updated this layer.
    """

    number: int
    devices: tuple[Device, ...]
    parts: tuple[_LayerPass, ...]
    loss: Collective | None
    waits: bool

    def tasks(self, step: int, computed: list[TaskId]) -> Generator[Task, None, list[TaskId]]:
        """Yield the sub-batch's tasks; `computed`: tasks that compute the body's activations.

        Returns the tasks after which the workers have the gradients of their bodies' activations.
        """
        done = list(computed)
        for part in self.parts:
            yield from self._forward(step, part, done)
        if self.loss is not None:
            yield from self._exchange(step, self.loss, done)
        for part in reversed(self.parts):
            yield from self._backward(step, part, done)
        return done

    def updated(self, step: int, worker: int) -> list[TaskId]:
        """Return the tasks before a worker's update: those that end each head layer's backward."""
        return [self._gradients(step, part, worker, self.number) for part in self.parts]

    def _forward(self, step: int, part: _LayerPass, done: list[TaskId]) -> Iterator[Task]:
        """Yield the tasks of a layer's forward pass; update `done`, each worker's last task."""
        if part.gathered is not None:
            for worker, ready in enumerate(done):
                yield from part.gathered.encodes(step, worker, ready)
            yield from self._exchange(step, part.gathered, done)
        for worker, device in enumerate(self.devices):
            after = [done[worker]]
            if self.waits and self.number:
                after.append(self._gradients(step, part, worker, self.number - 1))
            own = TaskId(step, Kind.FORWARD, part.layer, worker, self.number)
            yield Task(own, (compute_lane(device.name),), part.work.forward, tuple(after))
            done[worker] = own

    def _backward(self, step: int, part: _LayerPass, done: list[TaskId]) -> Iterator[Task]:
        """Yield the tasks of a layer's backward pass; update `done`, each worker's last task."""
        for worker, device in enumerate(self.devices):
            on = (compute_lane(device.name),)
            own = TaskId(step, Kind.BACKWARD, part.layer, worker, self.number)
            yield Task(own, on, part.work.backward_input, (done[worker],))
            done[worker] = own
            if part.returned is not None:
                yield from part.returned.encodes(step, worker, own)
            if part.work.backward_weight is not None:
                gradients = self._gradients(step, part, worker, self.number)
                yield Task(gradients, on, part.work.backward_weight, (own,))
        if part.returned is not None:
            yield from self._exchange(step, part.returned, done)

    def _exchange(self, step: int, exchange: Collective, done: list[TaskId]) -> Iterator[Task]:
        sent, decoded = yield from exchange.tasks(step, done)
        done[:] = [decoded.get(worker, sent) for worker in range(len(done))]

    def _gradients(self, step: int, part: _LayerPass, worker: int, number: int) -> TaskId:
        label = part.layer if part.work.backward_weight is None else weights_of(part.layer)
        return TaskId(step, Kind.BACKWARD, label, worker, number)


def _sub_batches(
    parts: Split, devices: tuple[Device, ...], config: SubBatch, ring: Ring | None
) -> Iterator[_SubBatchPlan]:
    """Yield a step's sub-batches, as if every worker had the head's largest part."""
    workers, batch_size = config.workers, parts.body.batch_size
    updates_each = config.updates == "sub-batch"
    there, back = None, None
    if workers > 1:
        stations = dict(enumerate(devices))
        there = Coding.of(config.activations, stations, parts.head.layers, _FLOAT32)
        back = Coding.of(config.activation_gradients, stations, parts.head.layers, _FLOAT32)
    element_size = max(4, parts.head.layers[-1].parameters[0].element_size)
    loss_nbytes = _LOSS_VALUES * element_size * rows_per_sample(parts)  # per sample
    for number, samples in enumerate(evenly(batch_size, config.num_sub_batches(batch_size))):
        exchange = partial(_exchange, ring, workers, number)
        layers = []
        inputs = samples * parts.body.layers[-1].activation_nbytes / batch_size
        for layer in parts.head.layers:
            share, part = _share(layer, workers), workers * samples / batch_size
            accumulates = number > 0 and not updates_each
            work, gathered, returned = layer_work(layer, share, part, accumulates), None, None
            if matrix_of(layer) is not None:
                gathered = exchange(Kind.SEND, layer.name, inputs, there, 1)
                returned = exchange(Kind.REDUCE, returned_of(layer.name), inputs, back, workers)
            if updates_each:
                work = work.with_update(update_work(layer, share))
            layers.append(_LayerPass(layer.name, work, gathered, returned))
            inputs = share * part * layer.activation_nbytes
        loss = exchange(Kind.SEND, LOSS, workers * samples * loss_nbytes, None, 1)
        yield _SubBatchPlan(number, devices, tuple(layers), loss, updates_each)


def _exchange(
    ring: Ring | None,
    workers: int,
    number: int | None,
    kind: Kind,
    part: str,
    nbytes: float,
    coding: Coding | None,
    num_encoded: int,
) -> Collective | None:
    """Return an all-gather or a reduce-scatter among all workers; None if `ring` is None.

    `number`: number of the sub-batch; None outside the head. `nbytes`: bytes of a worker's message.
    With a codec, a worker encodes `num_encoded` messages, and decodes one from every worker.
    """
    if ring is None:
        return None
    values = round(nbytes / 4)
    if coding is not None:
        nbytes = coding.wire_format.nbytes(values)
    transfer = ring.gathering(nbytes)  # a reduce-scatter takes as long as an all-gather
    if coding is None or coding.speed.is_within_links:
        return Collective(kind, (CollectivePiece(part, transfer, Cost(), Cost()),), (), number)
    encode = Cost(flops=num_encoded * values, num_calls=1)
    decode = Cost(flops=workers * values, num_calls=1)
    piece = CollectivePiece(part, transfer, encode, decode)
    return Collective(kind, (piece,), coding.coders, number)


def _share(layer: Layer, workers: int) -> float:
    outputs = num_outputs(layer)
    return -(-outputs // workers) / outputs


def _step_tasks(
    compute: ComputeStep,
    passes: tuple[_SubBatchPlan, ...],
    labels: Collective | None,
    gradients: Mapping[str, Collective],
    update: Cost,
    step: int,
) -> Iterator[Task]:
    """Yield the tasks of a step.

    `passes`: the sub-batches. `labels`: the exchange of targets. `gradients`: the all-reduce of
    each layer of the body, in backward order. `update`: cost of a worker's optimizer step.
    """
    workers, body = compute.workers, compute.workload
    backward: list[list[Task]] = []
    for worker in workers:
        tasks = list(compute.tasks(step, worker))
        backward.append([task for task in tasks if task.kind is Kind.BACKWARD])
        yield from (task for task in tasks if task.kind is not Kind.BACKWARD)
    if labels is not None:  # targets are sent before the first sub-batch
        yield from labels.tasks(step, [TaskId(step, Kind.LOAD, "", worker) for worker in workers])
    computed = [TaskId(step, Kind.FORWARD, body.layers[-1].name, worker) for worker in workers]
    returned = []
    for one in passes:
        done = yield from one.tasks(step, computed)
        returned.append(done)
    for worker, (first, *others) in zip(workers, backward, strict=True):
        after = tuple(done[worker] for done in returned)
        for task in (first._replace(after=after), *others):
            yield task
            if task.part in gradients:
                yield from gradients[task.part].encodes(step, worker, task.id)
    last, decoded = tuple[TaskId, ...](), list[dict[int, TaskId]]()
    for layer, exchange in gradients.items():
        ready = [TaskId(step, Kind.BACKWARD, layer, worker) for worker in workers]
        sent, results = yield from exchange.tasks(step, ready, last)
        last = (sent,)
        decoded.append(results)
    for worker in workers:
        averaged = [results[worker] for results in decoded if results]
        own = [task for one in passes for task in one.updated(step, worker)]
        after = (*last, *averaged, compute.after_backward(step, worker), *own)
        yield compute.step_task(step, worker, after)._replace(cost=update)
