"""The plan of strategy subbatch: sub-batches through a split head (Dettmers 2016, 2.4 and 5.1.2).

    worker0 compute   load body's forward | head 0 | head 1 | ... | body's backward       |  step
    exchange                      [gather 0][gather 1] [errors 0] [errors K-1] [layer 2][layer 1]

Each of K workers trains the body on its own batch. For each of K passes all send a Kth of what
their bodies computed to all, and put it through the head together (`passes`), while the next
sub-batch is on its way; the errors come back the way the activations went. With all of them the
body's backward begins, behind which each layer's gradients are averaged as they are ready. The
head's gradients never travel. With updates per sub-batch, a layer's next pass waits for them;
otherwise the passes overlap, so that one computes while another exchanges.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from paceline.core.collective import Coding, Collective, check_encodable
from paceline.core.cost import compute_lane
from paceline.core.machine import Device, Machine
from paceline.core.memory import feature_nbytes, state_nbytes
from paceline.core.plan import Cost, Kind, Plan, Task, task_name
from paceline.core.step import ComputeStep, after_update
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.workload import Layer, Workload
from paceline.strategies.subbatch.config import SubBatch
from paceline.strategies.subbatch.head import Cut, cut, matrix_of, num_outputs, shares
from paceline.strategies.subbatch.passes import Pass, Split, update_of

_GRADIENTS = (2, 4)  # bytes: float32, and what it holds exactly
_FLOAT32 = (4,)  # bytes: what is encoded of activations and errors


def plan(workload: Workload, machine: Machine, config: SubBatch, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the model has no head to split, the machine has fewer devices or they are not
    linked, or it is not known how fast they are with a codec.
    """
    devices = machine.first_devices(config.workers)
    parts = cut(workload, config.head, config.workers)
    work = _Step.of(parts, machine, devices, config)
    return Plan(task for step in range(window.num_steps) for task in work.tasks(step))


def memory(workload: Workload, machine: Machine, config: SubBatch) -> Mapping[str, int]:
    """Return the bytes that each device needs: a whole body, and its part of the head.

    What is gathered for the head's layers is kept until their backward: of all sub-batches, or of
    two of them if the weights are updated with each. InvalidInput as for `plan`.
    """
    devices = machine.first_devices(config.workers)
    parts = cut(workload, config.head, config.workers)
    body = parts.body
    whole = state_nbytes(body.layers) + feature_nbytes(body.layers) + body.input_nbytes
    num_kept = 2 if config.updates == "sub-batch" else config.workers
    features = _head_features(parts) * min(num_kept, config.workers)
    return {
        device.name: whole + features + _head_state(parts, config.workers, worker)
        for worker, device in enumerate(devices)
    }


def _head_state(parts: Cut, workers: int, worker: int) -> int:
    """Return the bytes of a worker's part of the head's parameters, gradients and momentum."""
    state = 0
    for layer in parts.head:
        outputs = num_outputs(layer)
        own = shares(outputs, workers)[worker]
        state += state_nbytes([layer]) * own // outputs
    return state


def _head_features(parts: Cut) -> int:
    """Return the bytes that one sub-batch keeps: what is gathered, and the last layer's outputs."""
    before = [parts.body.layers[-1], *parts.head]
    gathered = [
        one.activation_nbytes
        for one, layer in zip(before, parts.head, strict=False)
        if matrix_of(layer) is not None
    ]
    return sum(gathered) + parts.head[-1].activation_nbytes


@dataclass(frozen=True)
class _Step:
    """What every step of the window does, priced once."""

    compute: ComputeStep
    passes: tuple[Pass, ...]
    gradients: tuple[tuple[Layer, Collective], ...]
    update: Cost

    @classmethod
    def of(
        cls, parts: Cut, machine: Machine, devices: tuple[Device, ...], config: SubBatch
    ) -> "_Step":
        body, head, workers = parts.body, parts.head, config.workers
        ring = None
        if workers > 1:
            ring = Ring.over(machine, devices, [compute_lane(device.name) for device in devices])
        each = config.updates == "sub-batch"
        split = Split(
            layers=head,
            batch_size=body.batch_size,
            gathered_nbytes=body.layers[-1].activation_nbytes,
            workers=workers,
            ring=ring,
            activations=_coding(config.activations, parts, devices),
            errors=_coding(config.errors, parts, devices),
            updates_each=each,
        )
        samples = shares(body.batch_size, workers)
        compute = ComputeStep(body, devices)
        own = Cost() if each else sum((update_of(layer, workers) for layer in head), Cost())
        return cls(
            compute,
            tuple(split.one(number, count) for number, count in enumerate(samples)),
            _reductions(body, ring, devices, config.gradients),
            compute.update + own,
        )

    def tasks(self, step: int) -> Iterator[Task]:
        workers, devices = self.compute.workers, self.compute.devices
        backward: dict[int, list[Task]] = {}
        for worker in workers:
            tasks = list(self.compute.tasks(step, worker, after_update(step, worker)))
            backward[worker] = [task for task in tasks if task.kind is Kind.BACKWARD]
            yield from (task for task in tasks if task.kind is not Kind.BACKWARD)
        last = self.compute.workload.layers[-1].name
        computed = [task_name(step, Kind.FORWARD, last, worker) for worker in workers]
        for one in self.passes:
            yield from one.tasks(step, devices, computed)
        for worker in workers:
            yield from self._backward(step, worker, backward[worker])
        sent: tuple[str, ...] = ()
        for layer, exchange in self.gradients:
            ready = [task_name(step, Kind.BACKWARD, layer.name, worker) for worker in workers]
            yield from exchange.tasks(step, ready, sent)
            sent = (exchange.sent(step),)
        for worker in workers:
            yield self._update(step, worker, sent)

    def _backward(self, step: int, worker: int, tasks: list[Task]) -> Iterator[Task]:
        """Yield the body's backward, from when all errors are there, and what it encodes."""
        encoded = {layer.name: exchange for layer, exchange in self.gradients}
        returned = tuple(one.returned(step, worker) for one in self.passes)
        for task in [replace(tasks[0], after=returned), *tasks[1:]]:
            yield task
            if task.part in encoded:
                yield from encoded[task.part].encodes(step, worker, task.name)

    def _update(self, step: int, worker: int, sent: tuple[str, ...]) -> Task:
        decoded = [one.result(step, worker) for _, one in self.gradients if one.coders]
        own = [name for one in self.passes for name in one.updated(step, worker)]
        after = (*sent, *decoded, self.compute.after_backward(step, worker), *own)
        return replace(self.compute.step_task(step, worker, after), cost=self.update)


def _coding(codec: str | None, parts: Cut, devices: tuple[Device, ...]) -> Coding | None:
    if codec is None or len(devices) == 1:
        return None
    check_encodable(Workload("head", 1, parts.head, tuple(range(len(parts.head))), 0), _FLOAT32)
    return Coding.by(codec, dict(enumerate(devices)))


def _reductions(
    body: Workload, ring: Ring | None, devices: tuple[Device, ...], codec: str | None
) -> tuple[tuple[Layer, Collective], ...]:
    """Return the all-reduce of each layer of the body, as they are ready in backward."""
    if ring is None:
        return ()
    coding = None
    if codec is not None:
        check_encodable(body, _GRADIENTS)
        coding = Coding.by(codec, dict(enumerate(devices)))
    kind = Kind.REDUCE
    return tuple(
        (
            layer,
            Collective.over(
                ring, kind, layer.name, layer.gradient_nbytes, layer.num_parameters, coding
            ),
        )
        for layer in body.in_backward_order
        if layer.parameters
    )
