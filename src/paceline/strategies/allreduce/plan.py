"""The plan of strategy allreduce: bucketed and overlapped as torch's DistributedDataParallel does.

    worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 |          step
    exchange                                      [bucket 0] [bucket 1]

A bucket is reduced when all workers have computed all its gradients; buckets follow one another;
the weight update waits for the last. With a codec, see `core.collective`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.core.calibration import Measurements, line_through, linked_in_ring
from paceline.core.collective import Coding, Collective, check_encodable
from paceline.core.cost import compute_lane
from paceline.core.machine import Device, Machine
from paceline.core.plan import Kind, Plan, Task, task_name
from paceline.core.step import ComputeStep, after_update
from paceline.core.strategy import Window
from paceline.core.transfer import Ring
from paceline.core.workload import Layer, Workload
from paceline.strategies.allreduce.config import AllReduce

_MIB = 2**20
_ENCODABLE = (2, 4)  # bytes: float32, and what it holds exactly


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced together; it is complete when `last_layer` has been computed."""

    nbytes: int
    last_layer: str
    num_parameters: int
    num_values: int


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
            bucket = open_.pop(group, Bucket(0, "", 0, 0))
            bucket = Bucket(
                bucket.nbytes + parameter.nbytes,
                layer.name,
                bucket.num_parameters + 1,
                bucket.num_values + parameter.numel,
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
    exchanges = _exchanges(workload, machine, devices, config) if config.workers > 1 else ()
    work = _Step(ComputeStep(workload, devices), exchanges)
    return Plan.of_steps(work.tasks, window.num_steps)


def _exchanges(
    workload: Workload, machine: Machine, devices: Sequence[Device], config: AllReduce
) -> tuple[tuple[Bucket, Collective], ...]:
    parts = buckets(workload.in_backward_order, config.bucket_mb)
    ring = Ring.over(machine, devices, [compute_lane(device.name) for device in devices])
    coding = None
    if config.codec is not None:
        check_encodable(workload, _ENCODABLE)
        coding = Coding.by(config.codec, dict(enumerate(devices)))
    return tuple(
        (
            part,
            Collective.over(ring, Kind.REDUCE, str(i), part.nbytes, part.num_values, coding),
        )
        for i, part in enumerate(parts)
    )


@dataclass(frozen=True)
class _Step:
    """What every step of the window does, priced once."""

    compute: ComputeStep
    exchanges: tuple[tuple[Bucket, Collective], ...]

    def tasks(self, step: int) -> Iterator[Task]:
        workers = self.compute.workers
        for worker in workers:
            yield from self._until_backward(step, worker)
        last: tuple[str, ...] = ()
        for bucket, exchange in self.exchanges:
            ready = [task_name(step, Kind.BACKWARD, bucket.last_layer, w) for w in workers]
            yield from exchange.tasks(step, ready, last)
            last = (exchange.sent(step),)
        for worker in workers:
            decoded = [one.result(step, worker) for _, one in self.exchanges if one.coders]
            after = (*last, *decoded, self.compute.after_backward(step, worker))
            yield self.compute.step_task(step, worker, after)

    def _until_backward(self, step: int, worker: int) -> Iterator[Task]:
        """Yield the computation, and what a worker encodes, each where a hook begins it."""
        for task in self.compute.tasks(step, worker, after_update(step, worker)):
            yield task
            if task.kind is Kind.BACKWARD:
                for exchange in self._completed.get(task.part, ()):
                    yield from exchange.encodes(step, worker, task.name)

    @cached_property
    def _completed(self) -> dict[str, list[Collective]]:
        """The exchanges of the buckets that each layer completes."""
        completed: dict[str, list[Collective]] = {}
        for bucket, exchange in self.exchanges:
            completed.setdefault(bucket.last_layer, []).append(exchange)
        return completed


def calibrate(machine: Machine, measured: Measurements, config: AllReduce | None = None) -> Machine:
    """Return the machine whose devices are joined in a ring as fast as the measured exchanges."""
    codec = config.codec if config else None
    return linked_in_ring(machine, machine.devices, line_through(measured), codec)
