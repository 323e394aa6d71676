"""Fit a machine to the workers' speed trials; admit workers and predict the run.

The time of a batch is modelled as calls * call latency + flops / flop rate. Latency and rate are
fitted to the trials of two batch sizes. The fitted latency includes the memory traffic of a small
batch and the copies of the model, so bytes cost nothing in the fitted machine. The batches of a GPU
overlap, so a batch's time is measured from the end of the previous batch to its own end.

A worker is admitted if whole epochs are faster with it. A worker can be useless for two
reasons. At the end of an epoch, all workers wait for the slowest worker's last batch, which matters
if an epoch has few batches. And workers that share cores slow each other down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from paceline.core.cost import Rate
from paceline.core.link_fit import LinearTime, linked
from paceline.core.losses import Losses
from paceline.core.machine import DeviceKind, Machine
from paceline.core.plan import Plan, Task
from paceline.core.workload import Workload
from paceline.measure.this_machine import UNLIMITED_BYTES_PER_S, device_here, host_here
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.messages import SpeedTrial
from paceline.strategies.hogbatch.plan import HOST, BatchCosts, BatchTasks, PricedWorkers, computed

_SOURCE = "measured by the workers' trials before this run"
_FREE = LinearTime(0.0, 1 / UNLIMITED_BYTES_PER_S)  # copies take no time: trials include them
_LEAST_SHARE = 1e-3  # least fraction of a batch's time that the fit assigns to arithmetic
_GAIN = 1.001  # smaller gains are rounding errors
_MOST_JUDGED_EPOCHS = 3  # simulate up to this many epochs: in the first, the policy still adapts
_MOST_JUDGED_BATCHES = 5000  # batches simulated at the start of a long epoch


def machine_of(workload: Workload, trials: Sequence[SpeedTrial]) -> Machine:
    """Return a machine on which planned batches take as long as in the trials."""
    # Without the option `threads`, a plan divides all cores of a host among its workers. So give
    # the host only the cores that the workers use.
    cores = sum(one.spec.num_cores for one in trials) or 1
    host, devices = host_here(HOST, _SOURCE, cores=cores), []
    for one in trials:
        flops_per_s, latency_s = _rate(workload, one)
        speed = Rate(flops_per_s, UNLIMITED_BYTES_PER_S)
        own = one.spec.name(one.number), HOST, one.spec.kind, speed, _SOURCE
        devices.append(device_here(*own, call_latency_s=latency_s))
    machine = Machine(
        name="this-machine", hosts=(host,), devices=tuple(devices), losses=Losses.none(_SOURCE)
    )
    return linked(machine, [(host, one) for one in devices if one.kind == DeviceKind.GPU], _FREE)


def _rate(workload: Workload, trial: SpeedTrial) -> tuple[float, float]:
    """Fit a device's flops/s and seconds per call to a trial, and return both."""
    points = []
    for size, batch_s in trial.seconds.items():
        own = [cost for _, _, cost in computed(workload, trial.spec.threads, size)]
        points.append((sum(one.flops for one in own), batch_s))
    num_calls = sum(one.num_calls for one in own)  # equal for all sizes
    (flops, seconds), (most_flops, most_s) = points[0], points[-1]
    per_flop_s = (most_s - seconds) / (most_flops - flops) if most_flops > flops else 0.0
    per_flop_s = max(per_flop_s, _LEAST_SHARE * most_s / most_flops)
    per_call_s = (most_s - per_flop_s * most_flops) / num_calls
    if most_flops == flops or per_call_s <= 0:  # only one size was tried, or times are noisy
        return most_flops / most_s, 0.0
    return 1 / per_flop_s, per_call_s


def plan_of_batches(
    workload: Workload,
    config: Hogbatch,
    trials: Sequence[SpeedTrial],
    sizes: Mapping[int, Sequence[int]],
) -> tuple[Plan, Machine]:
    """Return a plan with batches of these sizes, and the machine for which it is planned.

    `sizes`: the sizes of each worker's batches in order, by worker number.
    """
    machine, tasks = machine_of(workload, trials), list[Task]()
    for (number, spec, _), device in zip(trials, machine.devices, strict=True):
        costs = BatchCosts(number, workload, machine, device, spec.threads)
        batches = BatchTasks(config.depth_of(spec.kind))
        for size in sizes.get(number, ()):
            tasks += batches.next(costs.tasks(size))
    return Plan(tasks), machine


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run on `num_cores` cores; each epoch has `num_samples` samples."""

    workload: Workload
    config: Hogbatch
    num_samples: int
    num_epochs: int
    num_cores: int


class Prediction(NamedTuple):
    """The predicted speed of a run, and each device's utilisation and share of the updates."""

    samples_per_s: float
    shares: dict[str, float]
    utilisation: dict[str, float]


def admit(epochs: Epochs, trials: Sequence[SpeedTrial]) -> dict[int, str]:
    """Decide which workers a run keeps; return by number why others are not kept.

    A worker is not kept if the run is at least as fast without it. Tests workers from the slowest
    to the fastest, until a worker speeds up the run or one is left. `trials`: simultaneous trials
    of all workers.
    """
    remaining, useless = list(trials), {}
    together = predict(epochs, remaining).samples_per_s
    while len(remaining) > 1:
        slowest = min(remaining, key=lambda trial: trial.samples_per_s)
        others = unburdened(remaining, slowest, epochs.num_cores)
        without = predict(epochs, others).samples_per_s
        if together > _GAIN * without:
            break
        effect = "slows the run down" if together * _GAIN < without else "adds almost nothing"
        useless[slowest.number] = (
            f"worker {slowest.number} ({slowest.spec}) {effect}: "
            f"{together:.4g} samples/s with it, {without:.4g} without"
        )
        remaining, together = others, without
    return useless


def unburdened(
    trials: Sequence[SpeedTrial], removed: SpeedTrial, num_cores: int
) -> list[SpeedTrial]:
    """Return the other workers' trials, with the times expected without `removed`.

    Assumes that threads share cores evenly, that a worker with `slow` computes 1/`slow` of the
    time, and that a GPU worker uses no core.
    """

    def crowding(some: Sequence[SpeedTrial]) -> float:
        used = sum(one.spec.num_cores / one.spec.slow for one in some)
        return max(1.0, used / num_cores)

    left = [trial for trial in trials if trial is not removed]
    faster = crowding(left) / crowding(trials)
    return [
        trial._replace(seconds={size: s * faster for size, s in trial.seconds.items()})
        if trial.spec.num_cores
        else trial
        for trial in left
    ]


def predict(epochs: Epochs, trials: Sequence[SpeedTrial]) -> Prediction:
    """Predict the speed of whole epochs by simulation.

    An epoch ends when its last batch ends. Update counts and batch sizes persist between epochs, as
    in the coordinator. The middle of a long epoch is extrapolated from its beginning.
    """
    specs, machine = [trial.spec for trial in trials], machine_of(epochs.workload, trials)
    workers = PricedWorkers(epochs.workload, machine, epochs.config, specs)
    num_epochs = min(epochs.num_epochs, _MOST_JUDGED_EPOCHS)
    seconds = [_epoch_seconds(workers, epochs.num_samples) for _ in range(num_epochs)]
    simulated_s, extrapolated_s = map(sum, zip(*seconds, strict=True))
    names, total = [one.spec.name(one.number) for one in trials], sum(workers.num_updates)
    return Prediction(
        num_epochs * epochs.num_samples / (simulated_s + extrapolated_s),
        {name: made / total for name, made in zip(names, workers.num_updates, strict=True)},
        {name: own / simulated_s for name, own in zip(names, workers.computing_s, strict=True)},
    )


def _epoch_seconds(workers: PricedWorkers, num_samples: int) -> tuple[float, float]:
    """Predict an epoch's duration: the sum of the simulated and the extrapolated seconds.

    Of a long epoch, only the first batches and as many samples at its end are simulated.
    """
    left, num_batches, extrapolated_s = num_samples, 0, 0.0
    free = [(0.0, worker) for worker in range(len(workers.specs))]
    while left:
        now_s, worker = heappop(free)
        workers.complete(worker)
        batch = workers.next_batch(worker, left)
        heappush(free, (now_s + batch.period_s, worker))
        left -= batch.size
        num_batches += 1
        assigned = num_samples - left
        if num_batches == _MOST_JUDGED_BATCHES and left > assigned:
            extrapolated_s = (left - assigned) * now_s / assigned
            left = assigned
    for _, worker in free:
        workers.complete(worker)
    return max(end_s for end_s, _ in free), extrapolated_s
