"""The plan of strategy allreduce: bucketed and overlapped as torch's DistributedDataParallel does.

    worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 |          step
    exchange                                      [bucket 0] [bucket 1]

A bucket is reduced when all workers have computed all its gradients; buckets follow one another;
the weight update waits for the last. With a codec, see `core.collective`. Cores copy gradients into
buckets in backward, and what a codec has decoded back into them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.collective import Collective, coding_of
from paceline.core.cost import compute_lane
from paceline.core.link_fit import ExchangeSamples, line_through, linked_in_ring
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import Cost, Kind, Plan, Task, TaskId
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.workload import Layer, Workload
from paceline.strategies.allreduce.config import AllReduce

_MIB = 2**20
_ENCODABLE = (2, 4)  # bytes: float32, and what it holds exactly
_COPIED = 2  # bytes read and written for each byte that is copied


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together; it is complete when `last_layer` has been computed."""

    nbytes: int = 0
    last_layer: str = ""
    num_parameters: int = 0
    num_values: int = 0


_Exchanges = tuple[tuple[Bucket, Collective], ...]


def buckets(ready: Sequence[Layer], bucket_mb: int | None) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel makes after its first iteration.

    Parameters are taken as their gradients become ready, one group per element size. A bucket is
    closed by the parameter with which it reaches its capacity.
    """
    capacities = [_MIB, 25 * _MIB] if bucket_mb is None else [bucket_mb * _MIB]
    closed: list[Bucket] = []
    open_: dict[int, Bucket] = {}
    num_closed: dict[int, int] = {}
    for layer in ready:
        for parameter in layer.parameters:
            group = parameter.element_size
            before = open_.pop(group, Bucket())
            bucket = Bucket(
                before.nbytes + parameter.nbytes,
                layer.name,
                before.num_parameters + 1,
                before.num_values + parameter.numel,
            )
            number = num_closed.get(group, 0)
            if bucket.nbytes >= capacities[min(number, len(capacities) - 1)]:
                closed.append(bucket)
                num_closed[group] = number + 1
            else:
                open_[group] = bucket
    return closed + list(open_.values())


def plan(workload: Workload, machine: Machine, config: AllReduce, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the machine has fewer devices or they are not linked, or it is not known how
    fast they are with the codec.
    """
    devices = machine.first_devices(config.workers)
    exchanges: _Exchanges = ()
    if config.workers > 1:
        ring = Ring.at_once(machine, devices, [compute_lane(device.name) for device in devices])
        coding = coding_of(config.codec, workload, devices, _ENCODABLE)
        parts = buckets(workload.in_backward_order, config.bucket_mb)
        exchanges = tuple(
            (b, Collective.over(ring, Kind.REDUCE, str(i), b.nbytes, b.num_values, coding))
            for i, b in enumerate(parts)
        )
        workload = _copied(workload, devices, _COPIED if config.codec is None else 2 * _COPIED)
    step_tasks = partial(_step_tasks, ComputeStep(workload, devices), exchanges)
    return Plan.of_steps(step_tasks, window.num_steps)


def _copied(workload: Workload, devices: Sequence[Device], traffic: int) -> Workload:
    """Return the workload whose backward has so many bytes more for each byte of gradients.

    Where there are cores: GPUs copy at hundreds of GB/s, and their host meanwhile does nothing.
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
                # Encoding begins here, in the hook of a bucket's last gradient.
                for exchange in completed.get(task.part, ()):
                    yield from exchange.encodes(step, worker, task.id)
    last: tuple[TaskId, ...] = ()
    for bucket, exchange in exchanges:
        ready = [TaskId(step, Kind.BACKWARD, bucket.last_layer, w) for w in compute.workers]
        yield from exchange.tasks(step, ready, last)
        last = (exchange.sent(step),)
    for worker in compute.workers:
        decoded = [one.result(step, worker) for _, one in exchanges if one.coders]
        after = (*last, *decoded, compute.after_backward(step, worker))
        yield compute.step_task(step, worker, after)


def calibrate(
    machine: Machine, measured: ExchangeSamples, config: AllReduce | None = None
) -> Machine:
    """Return the machine whose devices are joined in a ring as fast as the measured exchanges."""
    codec = config.codec if config else None
    line = line_through(measured)
    return linked_in_ring(machine, machine.devices, line, codec, at_once=True)
