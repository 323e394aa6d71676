"""One sub-batch on its way through the head, as tasks.

    worker0 compute        [fc1][fc2]        | [fc2 errors][fc2 weights][fc1 errors][fc1 weights]
    exchange        [send 1]  [send 2] [loss]             [reduce 2]               [reduce 1]

Each worker has some outputs of every layer. What a linear layer works on is gathered from all, and
the errors that it returns are sums over all, of which each worker gets the part that it had sent.
The loss is computed from split logits: three values for each sample travel.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.collective import Coding, Collective, Piece
from paceline.core.cost import compute_lane
from paceline.core.machine import Device
from paceline.core.pace import update_cost
from paceline.core.plan import Cost, Kind, Task, task_name
from paceline.core.transfer import Ring, Transfer
from paceline.core.workload import Layer, Workload
from paceline.strategies.subbatch.head import matrix_of, num_outputs

_LOSS_NBYTES = 3 * 4  # a sample's largest logit, its sum of exponentials and the target's logit


@dataclass(frozen=True)
class Part:
    """What one layer of the head does in a pass, on each worker and between them."""

    layer: str
    forward: Cost
    errors: Cost
    weights: Cost | None
    gathered: Collective | None
    returned: Collective | None


@dataclass(frozen=True)
class Pass:
    """A sub-batch: so many samples from each worker, through all layers of the head.

    `waits` says whether a layer waits for the update with the gradients of the pass before.
    """

    number: int
    parts: tuple[Part, ...]
    loss: Collective | None
    waits: bool

    def tasks(
        self, step: int, devices: Sequence[Device], computed: Sequence[str]
    ) -> Iterator[Task]:
        """Yield the pass, from when each worker has `computed` the body's activations."""
        done = list(computed)
        for part in self.parts:
            yield from self._forward(step, devices, part, done)
        if self.loss is not None:
            yield from self.loss.tasks(step, done)
            done = [self.loss.result(step, worker) for worker in range(len(devices))]
        for part in reversed(self.parts):
            yield from self._backward(step, devices, part, done)

    def returned(self, step: int, worker: int) -> str:
        """Return the name of the task after which a worker has the errors of its samples."""
        first = self.parts[0]
        if first.returned is not None:
            return first.returned.result(step, worker)
        return self._name(step, Kind.BACKWARD, first, worker)

    def updated(self, step: int, worker: int) -> list[str]:
        """Return the names of the tasks with which a worker has the gradients of its part."""
        return [self._gradients(step, part, worker) for part in self.parts]

    def _forward(
        self, step: int, devices: Sequence[Device], part: Part, done: list[str]
    ) -> Iterator[Task]:
        """Yield a layer's forward, and make `done` what ends it."""
        if part.gathered is not None:
            for worker, name in enumerate(done):
                yield from part.gathered.encodes(step, worker, name)
            yield from part.gathered.tasks(step, done)
            done[:] = [part.gathered.result(step, worker) for worker in range(len(devices))]
        for worker, device in enumerate(devices):
            after = [done[worker]]
            if self.waits and self.number:
                after.append(self._gradients(step, part, worker, self.number - 1))
            name = self._name(step, Kind.FORWARD, part, worker)
            on = (compute_lane(device.name),)
            yield Task(name, Kind.FORWARD, on, part.forward, tuple(after), part.layer)
            done[worker] = name

    def _backward(
        self, step: int, devices: Sequence[Device], part: Part, done: list[str]
    ) -> Iterator[Task]:
        """Yield a layer's backward, errors first, and make `done` what ends these."""
        for worker, device in enumerate(devices):
            on, name = (compute_lane(device.name),), self._name(step, Kind.BACKWARD, part, worker)
            yield Task(name, Kind.BACKWARD, on, part.errors, (done[worker],), part.layer)
            done[worker] = name
            if part.returned is not None:
                yield from part.returned.encodes(step, worker, name)
            if part.weights is not None:
                own = self._gradients(step, part, worker)
                label = _weights(part)
                yield Task(own, Kind.BACKWARD, on, part.weights, (name,), label)
        if part.returned is not None:
            yield from part.returned.tasks(step, done)
            done[:] = [part.returned.result(step, worker) for worker in range(len(devices))]

    def _gradients(self, step: int, part: Part, worker: int, number: int | None = None) -> str:
        number = self.number if number is None else number
        label = part.layer if part.weights is None else _weights(part)
        return task_name(step, Kind.BACKWARD, f"{label}/{number}", worker)

    def _name(self, step: int, kind: Kind, part: Part, worker: int) -> str:
        return task_name(step, kind, f"{part.layer}/{self.number}", worker)


def _weights(part: Part) -> str:
    return f"{part.layer}:weights"


@dataclass(frozen=True)
class Split:
    """The head as its workers have it, and how they send what they know of it.

    Layers have the costs of one worker's micro-batch, of `batch_size` samples. `gathered_nbytes`
    are those of what the body hands on. Parts are those of the worker with the most outputs.
    """

    layers: tuple[Layer, ...]
    batch_size: int
    gathered_nbytes: int
    workers: int
    ring: Ring | None
    activations: Coding | None
    errors: Coding | None
    updates_each: bool

    def one(self, number: int, samples: int) -> Pass:
        """Return the pass of that number, for which each worker sends so many samples."""
        parts, inputs = [], samples * self.gathered_nbytes / self.batch_size
        for layer in self.layers:
            linear = matrix_of(layer) is not None
            label = f"{layer.name}/{number}"
            own = share(layer, self.workers)
            rows = own * self.workers * samples / self.batch_size
            update = update_of(layer, self.workers) if self.updates_each else Cost()
            half = layer.backward.num_calls // 2
            both = times(layer.backward, rows / 2)
            parts.append(
                Part(
                    layer.name,
                    forward=times(layer.forward, rows),
                    errors=Cost(both.flops, both.nbytes, layer.backward.num_calls - half)
                    if linear
                    else times(layer.backward, rows) + update,
                    weights=Cost(both.flops, both.nbytes, half) + update if linear else None,
                    gathered=self._gathered(label, inputs) if linear else None,
                    returned=self._returned(f"{layer.name}:errors/{number}", inputs)
                    if linear
                    else None,
                )
            )
            inputs = rows * layer.activation_nbytes
        return Pass(number, tuple(parts), self._loss(number, samples), self.updates_each)

    def _gathered(self, label: str, nbytes: float) -> Collective | None:
        return self._exchange(Kind.SEND, label, nbytes, self.activations, 1)

    def _returned(self, label: str, nbytes: float) -> Collective | None:
        return self._exchange(Kind.REDUCE, label, nbytes, self.errors, self.workers)

    def _exchange(
        self, kind: Kind, label: str, nbytes: float, coding: Coding | None, num_encoded: int
    ) -> Collective | None:
        """Return an all-gather of `nbytes` of each worker, or the sum of as many for each.

        Each worker encodes its own part, or a part of each sum, and decodes as many as there are.
        """
        if self.ring is None:
            return None
        values = round(nbytes / 4)
        if coding is not None:
            nbytes = coding.wire_format.nbytes(values)
        transfer = half_reduction(self.ring, self.workers * nbytes)
        if coding is None or coding.speed.is_within_links:
            return Collective(kind, (Piece(label, transfer, Cost(), Cost()),), ())
        encode = Cost(flops=num_encoded * values, num_calls=1)
        decode = Cost(flops=self.workers * values, num_calls=1)
        return Collective(kind, (Piece(label, transfer, encode, decode),), coding.coders)

    def _loss(self, number: int, samples: int) -> Collective | None:
        nbytes = self.workers * samples * _LOSS_NBYTES
        return self._exchange(Kind.SEND, f"loss/{number}", nbytes, None, 1)


def half_reduction(ring: Ring, nbytes: float) -> Transfer:
    """Return what the sums of so many bytes, or gathering them, hold and cost.

    Each of n workers sends (n - 1) / n of them: half of what an all-reduce does.
    """
    on, cost = ring.reduction(nbytes)
    return Transfer(on, Cost(nbytes=cost.nbytes / 2, num_calls=cost.num_calls // 2))


def share(layer: Layer, workers: int) -> float:
    """Return the largest part of a layer's outputs that a worker has."""
    outputs = num_outputs(layer)
    return -(-outputs // workers) / outputs


def update_of(layer: Layer, workers: int) -> Cost:
    """Return the work of updating a worker's part of a layer."""
    return times(update_cost(Workload(layer.name, 1, (layer,), (0,), 0)), share(layer, workers))


def times(cost: Cost, factor: float) -> Cost:
    """Return the work for so many times the samples or outputs, in as many calls."""
    return Cost(cost.flops * factor, cost.nbytes * factor, cost.num_calls)
