"""The machine of a run, as a plan sees it: fitted to what batches of two sizes took each worker.

A batch takes a latency for each call, and its arithmetic at a rate: two unknowns, two sizes. What
a small batch pays for memory, and for copies of the model, is within the latency. Bytes cost
nothing then, so that the plan takes as long as was measured at both sizes, and lies on a line.
"""

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.core.machine import Device, Host, Link, Machine
from paceline.core.workload import Workload
from paceline.strategies.hogbatch.work import Work
from paceline.strategies.hogbatch.workers import WorkerSpec

HOST = "this-host"
_SOURCE = "measured by the workers' trials before this run"
_NO_TIME = 1e18  # bytes/s
_LEAST_SHARE = 1e-3  # of a batch's seconds that are arithmetic, whatever noise says


class Trial(NamedTuple):
    """What batches of some sizes took a worker, in seconds."""

    number: int
    spec: WorkerSpec
    seconds: Mapping[int, float]


def machine_of(workload: Workload, trials: Sequence[Trial]) -> Machine:
    """Return the machine of these workers, on which their batches take as long as in the trials."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = Host(
        name=HOST,
        cores=os.cpu_count() or 1,
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=_NO_TIME,
        source=_SOURCE,
    )
    bare = [_device(trial, memory, flops_per_s=1.0, latency_s=0.0) for trial in trials]
    links = tuple(
        Link(
            between=(HOST, device.name),
            bandwidth_bytes_per_s=_NO_TIME,
            latency_s=0.0,
            source=_SOURCE,
        )
        for device in bare
        if device.kind == "gpu"
    )
    machine = Machine(name="this-machine", hosts=(host,), devices=tuple(bare), links=links)
    fitted = [
        _device(trial, memory, *_rate(trial, workload, machine, device))
        for trial, device in zip(trials, bare, strict=True)
    ]
    return machine.model_copy(update={"devices": tuple(fitted)})


def _device(trial: Trial, memory: int, flops_per_s: float, latency_s: float) -> Device:
    return Device(
        name=trial.spec.name(trial.number),
        host=HOST,
        kind=trial.spec.kind,
        flops_per_s=flops_per_s,
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=_NO_TIME,
        call_latency_s=latency_s,
        source=_SOURCE,
    )


def _rate(
    trial: Trial, workload: Workload, machine: Machine, device: Device
) -> tuple[float, float]:
    """Return flops a second, and the latency of a call."""
    work = Work(workload, machine, device, trial.spec.threads, shared=True)
    points = [(*_arithmetic(work, size), seconds) for size, seconds in trial.seconds.items()]
    (calls, flops, seconds), (other_calls, other_flops, other_s) = points[0], points[-1]
    determinant = calls * other_flops - other_calls * flops
    if determinant:
        per_call_s = (seconds * other_flops - other_s * flops) / determinant
        per_flop_s = (calls * other_s - other_calls * seconds) / determinant
    else:
        per_call_s, per_flop_s = 0.0, 0.0
    # Noise may make either negative: then the larger batch decides alone.
    per_flop_s = max(per_flop_s, _LEAST_SHARE * other_s / other_flops)
    per_call_s = max(0.0, (other_s - per_flop_s * other_flops) / other_calls)
    if not determinant or per_call_s == 0.0:
        per_flop_s = other_s / other_flops
        per_call_s = 0.0
    return 1 / per_flop_s, per_call_s


def _arithmetic(work: Work, size: int) -> tuple[float, float]:
    """Return the calls and the flops that a device computes for a batch of that size."""
    stages = [stage for stage in work.stages(size) if stage.on[0].lane == "compute"]
    return (
        sum(stage.cost.num_calls for stage in stages),
        sum(stage.cost.flops for stage in stages),
    )
