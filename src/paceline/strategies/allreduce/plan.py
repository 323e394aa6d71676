"""Plan buckets and their all-reduces, as torch's DistributedDataParallel does.

    worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 |          step
    exchange                                      [bucket 0] [bucket 1]

The all-reduce of a bucket starts after all workers have computed all gradients of the bucket, and
after the all-reduce of the previous bucket. The weight update waits for the last bucket. CPU
workers copy gradients into buckets during backward. With a codec (`core.collective`) they also copy
the decoded gradients.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.collective import Coding, Collective
from paceline.core.cost import compute_lane
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import Cost, Kind, Plan, Task, TaskId
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.workload import Layer, Workload
from paceline.strategies.allreduce.config import AllReduce

_MIB = 2**20
_ENCODABLE = (2, 4)  # bytes per value that codecs accept (2: float16, bfloat16; 4: float32)
_COPIED = 2  # bytes of memory traffic per copied byte


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together, after the backward pass of `last_layer`."""

    nbytes: int = 0
    last_layer: str = ""
    num_values: int = 0


_Exchanges = tuple[tuple[Bucket, Collective], ...]


def buckets(ready: Sequence[Layer], bucket_mb: int | None) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel uses after its first iteration.

    `ready`: layers in backward order. A bucket has parameters of one element size, and is complete
    once it reaches its size limit: `bucket_mb`, or by default 1 MiB, then 25 MiB.
    """
    capacities = [_MIB, 25 * _MIB] if bucket_mb is None else [bucket_mb * _MIB]
    closed: list[Bucket] = []
    open_: dict[int, Bucket] = {}
    num_closed = Counter[int]()
    for layer in ready:
        for parameter in layer.parameters:
            group = parameter.element_size
            before = open_.pop(group, Bucket())
            numel = before.num_values + parameter.numel
            bucket = Bucket(before.nbytes + parameter.nbytes, layer.name, numel)
            if bucket.nbytes >= capacities[min(num_closed[group], len(capacities) - 1)]:
                closed.append(bucket)
                num_closed[group] += 1
            else:
                open_[group] = bucket
    return closed + list(open_.values())


def plan(workload: Workload, machine: Machine, config: AllReduce, window: Window) -> Plan:
    """Plan `window.num_steps` steps on the first `config.workers` devices."""
    devices = machine.first_devices(config.workers)
    exchanges: _Exchanges = ()
    if config.workers > 1:
        ring = Ring.at_once(machine, devices, [compute_lane(device.name) for device in devices])
        coding = Coding.of(config.codec, dict(enumerate(devices)), workload.layers, _ENCODABLE)
        parts = buckets(workload.in_backward_order, config.bucket_mb)
        exchanges = tuple(
            (b, Collective.over(ring, Kind.REDUCE, str(i), b.nbytes, b.num_values, coding))
            for i, b in enumerate(parts)
        )
        workload = _copied(workload, devices, _COPIED if config.codec is None else 2 * _COPIED)
    step_tasks = partial(_step_tasks, ComputeStep(workload, devices), exchanges)
    return Plan.of_steps(step_tasks, window.num_steps)


def _copied(workload: Workload, devices: Sequence[Device], traffic: int) -> Workload:
    """Add the copies of gradients into buckets to the memory traffic of backward.

    Changes nothing if all devices are GPUs. `traffic`: bytes read and written per gradient byte.
    """
    if all(device.kind == DeviceKind.GPU for device in devices):
        return workload
    layers = tuple(
        replace(one, backward=one.backward + Cost(nbytes=traffic * one.gradient_nbytes))
        for one in workload.layers
    )
    return replace(workload, layers=layers)


def _step_tasks(compute: ComputeStep, exchanges: _Exchanges, step: int) -> Iterator[Task]:
    completed: dict[str, list[Collective]] = {}
    for bucket, exchange in exchanges:
        completed.setdefault(bucket.last_layer, []).append(exchange)
    for worker in compute.workers:
        for task in compute.tasks(step, worker):
            yield task
            if task.kind is Kind.BACKWARD:
                # DistributedDataParallel encodes a bucket in the hook of its last gradient.
                for exchange in completed.get(task.part, ()):
                    yield from exchange.encodes(step, worker, task.id)
    last, decoded = tuple[TaskId, ...](), list[dict[int, TaskId]]()
    for bucket, exchange in exchanges:
        ready = [TaskId(step, Kind.BACKWARD, bucket.last_layer, w) for w in compute.workers]
        sent, results = yield from exchange.tasks(step, ready, last)
        last = (sent,)
        decoded.append(results)
    for worker in compute.workers:
        own = [results[worker] for results in decoded if results]
        after = (*last, *own, compute.after_backward(step, worker))
        yield compute.step_task(step, worker, after)
