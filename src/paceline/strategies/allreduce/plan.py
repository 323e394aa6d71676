"""The plan of strategy allreduce: bucketed and overlapped as torch's DistributedDataParallel does.

    worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 |          step
    exchange                                      [bucket 0] [bucket 1]

A bucket is reduced when all workers have computed all its gradients; buckets follow one another;
the weight update waits for the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.calibration import Measurements, line_through, linked_in_ring
from paceline.core.cost import compute_lane
from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan, Task, task_name
from paceline.core.step import ComputeStep, after_update
from paceline.core.strategy import Window
from paceline.core.transfer import Ring, Transfer
from paceline.core.workload import Layer, Workload
from paceline.strategies.allreduce.config import AllReduce

_MIB = 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together; it is complete when `last_layer` has been computed."""

    nbytes: int
    last_layer: str
    num_parameters: int


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
            bucket = open_.pop(group, Bucket(0, "", 0))
            bucket = Bucket(bucket.nbytes + parameter.nbytes, layer.name, bucket.num_parameters + 1)
            number = num_closed.get(group, 0)
            if bucket.nbytes >= capacities[min(number, len(capacities) - 1)]:
                closed.append(bucket)
                num_closed[group] = number + 1
            else:
                open_[group] = bucket
    return closed + list(open_.values())


def plan(workload: Workload, machine: Machine, config: AllReduce, window: Window) -> Plan:
    """Return the tasks of `window` steps on the first `config.workers` devices of the machine.

    InvalidInput if the machine has fewer devices or they are not linked.
    """
    devices = machine.first_devices(config.workers)
    parts = buckets(workload.in_backward_order, config.bucket_mb) if len(devices) > 1 else []
    cores = [compute_lane(device.name) for device in devices]
    ring = Ring.over(machine, devices, cores) if parts else None
    reductions = tuple((part, ring.reduction(part.nbytes)) for part in parts if ring)
    work = _Step(ComputeStep(workload, devices), reductions)
    return Plan(task for step in range(window.num_steps) for task in work.tasks(step))


@dataclass(frozen=True)
class _Step:
    """What every step of the window does, priced once."""

    compute: ComputeStep
    reductions: tuple[tuple[Bucket, Transfer], ...]

    def tasks(self, step: int) -> Iterator[Task]:
        workers = self.compute.workers
        for worker in workers:
            yield from self.compute.tasks(step, worker, after_update(step, worker))
        last: tuple[str, ...] = ()
        for i, (bucket, reduction) in enumerate(self.reductions):
            ready = [task_name(step, Kind.BACKWARD, bucket.last_layer, w) for w in workers]
            name = task_name(step, Kind.REDUCE, str(i))
            after = (*last, *ready)
            yield Task(name, Kind.REDUCE, reduction.on, reduction.cost, after, str(i))
            last = (name,)
        for worker in workers:
            after = (*last, self.compute.after_backward(step, worker))
            yield self.compute.step_task(step, worker, after)


def calibrate(machine: Machine, measured: Measurements) -> Machine:
    """Return the machine whose devices are joined in a ring as fast as the measured exchanges."""
    return linked_in_ring(machine, machine.devices, line_through(measured))
