"""The machine of a run, fitted to the trials of its workers: plans on it, and who is admitted.

A batch takes a latency for each call, and its arithmetic at a rate: two unknowns, two batch sizes
that were tried. The latency contains what a small batch pays for memory, and for copies of the
model. Bytes cost nothing then, so that a plan takes as long as was measured at both sizes. Batches
of a GPU overlap: theirs is the time from the end of one to that of the next.

Workers are admitted by the speed of whole epochs with and without them. No worker waits for a slow
one but at the end of an epoch, when no samples are left to hand out: the others then wait for its
last batch. So a slow worker can slow the others down if an epoch has few batches. And one that
computes on cores that others need gains what those lose.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from typing import NamedTuple

from paceline.core.link_fit import LinearTime, linked
from paceline.core.losses import Losses
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import Kind, Lane, Plan, Task
from paceline.core.timeline import Span
from paceline.core.workload import Workload
from paceline.measure.this_machine import UNLIMITED_BYTES_PER_S, host_here, memory_bytes
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.plan import (
    HOST,
    BatchCosts,
    BatchTasks,
    period_s,
    priced_batches,
)
from paceline.strategies.hogbatch.policy import SpeedTrial, policy_of, updates_of

_SOURCE = "measured by the workers' trials before this run"
_FREE = LinearTime(0.0, 1 / UNLIMITED_BYTES_PER_S)  # copies are within a batch's seconds
_LEAST_SHARE = 1e-3  # of a batch's seconds that are arithmetic, whatever noise says
_GAIN = 1.001  # less is rounding, and no gain
_MOST_JUDGED_EPOCHS = 3  # the first has batches that the policy still changes
_MOST_JUDGED_BATCHES = 5000  # of an epoch, before what lies in its middle is left out


def machine_of(workload: Workload, trials: Sequence[SpeedTrial]) -> Machine:
    """Return the machine of these workers, on which their batches take as long as in the trials."""
    # The cores that the workers compute with: a plan without `threads` shares them evenly.
    cores = sum(one.spec.threads for one in trials if one.spec.kind == DeviceKind.CPU) or 1
    devices = tuple(
        Device(
            name=trial.spec.name(trial.number),
            host=HOST,
            kind=trial.spec.kind,
            flops_per_s=1.0,  # until it is fitted
            memory_bytes=memory_bytes(),
            memory_bandwidth_bytes_per_s=UNLIMITED_BYTES_PER_S,
            source=_SOURCE,
        )
        for trial in trials
    )
    host = host_here(HOST, _SOURCE, cores=cores)
    machine = Machine(
        name="this-machine", hosts=(host,), devices=devices, losses=Losses.none(_SOURCE)
    )
    gpus = [device for device in devices if device.kind == DeviceKind.GPU]
    machine = linked(machine, [(host, gpu) for gpu in gpus], _FREE)
    fitted = []
    for trial, device in zip(trials, devices, strict=True):
        costs = BatchCosts(workload, machine, device, trial.spec.threads, shared=True)
        flops_per_s, latency_s = _rate(costs, trial.seconds)
        rates = {"flops_per_s": flops_per_s, "call_latency_s": latency_s}
        fitted.append(device.model_copy(update=rates))
    return machine.model_copy(update={"devices": tuple(fitted)})


def _rate(costs: BatchCosts, measured: Mapping[int, float]) -> tuple[float, float]:
    """Return flops a second, and the latency of a call, on which batches take the seconds."""
    points = []
    for size, batch_s in measured.items():
        own = [stage.cost for stage in costs.stages(size) if stage.on[0].lane is Lane.COMPUTE]
        points.append((sum(one.num_calls for one in own), sum(one.flops for one in own), batch_s))
    (calls, flops, seconds), (other_calls, other_flops, other_s) = points[0], points[-1]
    determinant = calls * other_flops - other_calls * flops
    per_flop_s = (calls * other_s - other_calls * seconds) / determinant if determinant else 0.0
    per_flop_s = max(per_flop_s, _LEAST_SHARE * other_s / other_flops)
    per_call_s = (other_s - per_flop_s * other_flops) / other_calls
    if not determinant or per_call_s <= 0:  # by noise: then the larger batch decides alone
        return 1 / (other_s / other_flops), 0.0
    return 1 / per_flop_s, per_call_s


def plan_of_batches(
    workload: Workload,
    machine: Machine,
    config: Hogbatch,
    specs: Mapping[int, WorkerSpec],
    sizes: Mapping[int, Sequence[int]],
) -> Plan:
    """Return the plan in which each worker, by its number, gets batches of these sizes in turn.

    The machine's devices have the workers' names. A GPU pushes its updates even if it is alone.
    """
    devices = {device.name: device for device in machine.devices}
    tasks: list[Task] = []
    for number, own in sizes.items():
        spec = specs[number]
        costs = BatchCosts(workload, machine, devices[spec.name(number)], spec.threads, shared=True)
        batches = BatchTasks(number, config.depth_of(spec.kind))
        for size in own:
            tasks += batches.of(costs.stages(size), size)
    return Plan(tasks)


def traced_sizes(spans: Sequence[Span]) -> dict[int, list[int]]:
    """Return the sizes of each worker's traced batches, in their order, from the STEP spans."""
    found: dict[int, list[int]] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        if span.kind is Kind.STEP and span.worker is not None:
            found.setdefault(span.worker, []).append(span.num_samples)
    return found


@dataclass(frozen=True)
class WorkerAdmission:
    """A worker, and the samples a second of all workers with it and without it."""

    worker: int
    spec: WorkerSpec
    samples_per_s: float
    without_samples_per_s: float

    @property
    def helps(self) -> bool:
        """True if all workers are faster with it."""
        return self.samples_per_s > _GAIN * self.without_samples_per_s

    @property
    def why(self) -> str:
        """The reason in one sentence, with the figures."""
        if self.helps:
            verdict = "helps"
        elif self.samples_per_s * _GAIN < self.without_samples_per_s:
            verdict = "would slow the others down"
        else:
            verdict = "would gain next to nothing"
        return (
            f"worker {self.worker} ({self.spec}) {verdict}: with it all reach "
            f"{self.samples_per_s:.4g} samples/s, without it {self.without_samples_per_s:.4g}"
        )


@dataclass(frozen=True)
class Epochs:
    """The epochs of a run: what is trained, on how many samples, how often.

    `num_cores` are the processors of the machine. `workload` has the batch size that the learning
    rate was chosen for.
    """

    workload: Workload
    config: Hogbatch
    num_samples: int
    num_epochs: int
    num_cores: int


class Prediction(NamedTuple):
    """The speed of a run, and by device the share of the updates, and of the time it computes."""

    samples_per_s: float
    shares: dict[str, float]
    utilisation: dict[str, float]


def admit(epochs: Epochs, trials: Sequence[SpeedTrial]) -> tuple[WorkerAdmission, ...]:
    """Judge the slowest worker and, while one does not help, the next slowest.

    Only the last of the verdicts may be that a worker helps; faster ones are taken to help, too.
    A single worker is never judged. `trials` were made by all workers at the same time.
    """
    remaining, verdicts = list(trials), []
    together = predict(epochs, remaining).samples_per_s
    while len(remaining) > 1:
        slowest = min(remaining, key=lambda trial: trial.samples_per_s)
        others = _unburdened(remaining, slowest, epochs.num_cores)
        without = predict(epochs, others).samples_per_s
        verdicts.append(WorkerAdmission(slowest.number, slowest.spec, together, without))
        if verdicts[-1].helps:
            break
        remaining, together = others, without
    return tuple(verdicts)


def _unburdened(
    trials: Sequence[SpeedTrial], removed: SpeedTrial, num_cores: int
) -> list[SpeedTrial]:
    """Return the trials without one, on cores for which it no longer competes.

    A stretched worker computes in only a part of its time, and a GPU's hardly needs a core. Threads
    share cores evenly.
    """

    def crowding(some: Sequence[SpeedTrial]) -> float:
        on_cores = [one.spec for one in some if one.spec.kind == DeviceKind.CPU]
        return max(1.0, sum(spec.threads / spec.slow for spec in on_cores) / num_cores)

    left = [trial for trial in trials if trial is not removed]
    before, after = crowding(trials), crowding(left)
    return [
        trial
        if trial.spec.kind == DeviceKind.GPU
        else trial._replace(seconds={n: s * after / before for n, s in trial.seconds.items()})
        for trial in left
    ]


def predict(epochs: Epochs, trials: Sequence[SpeedTrial]) -> Prediction:
    """Return what these workers reach together in whole epochs, which end with the last batch.

    A worker gets the next samples of an epoch whenever it is idle. Updates and batch sizes carry
    over from one epoch to the next, as in the coordinator. Of the many batches of a long epoch,
    those in the middle are taken to be like those at the beginning.
    """
    walk = _Walk(epochs, trials)
    num_epochs = min(epochs.num_epochs, _MOST_JUDGED_EPOCHS)
    whole_s = sum(walk.epoch_s(epochs.num_samples) for _ in range(num_epochs))
    names, total = [one.spec.name(one.number) for one in trials], sum(walk.made)
    return Prediction(
        num_epochs * epochs.num_samples / whole_s,
        {name: made / total for name, made in zip(names, walk.made, strict=True)},
        {name: busy / walk.judged_s for name, busy in zip(names, walk.busy_s, strict=True)},
    )


class _Walk:
    """The batches of epochs in turn: how many updates each worker makes, and how long it computes.

    `judged_s` are the seconds of all batches that were looked at.
    """

    def __init__(self, epochs: Epochs, trials: Sequence[SpeedTrial]) -> None:
        workload, specs = epochs.workload, [trial.spec for trial in trials]
        speeds = [trial.samples_per_s for trial in trials]
        self._specs, self._config = specs, epochs.config
        self._policy = policy_of(epochs.config, specs, speeds, workload.batch_size)
        self._seconds = self._seconds_on(machine_of(workload, trials), workload)
        self._updates, self._sizes = [0.0] * len(specs), [0] * len(specs)  # as the policy counts
        self.made, self.busy_s, self.judged_s = [0] * len(specs), [0.0] * len(specs), 0.0

    def epoch_s(self, num_samples: int) -> float:
        """Return the seconds of an epoch of so many samples."""
        left, num_batches, left_out_s = num_samples, 0, 0.0
        free = [(0.0, worker, 0) for worker in range(len(self._specs))]  # after so many samples
        while left:
            now_s, worker, done = heappop(free)
            self._count(worker, done)
            self._sizes[worker] = self._policy.next_batch(worker, self._updates, self._sizes)
            size = min(self._sizes[worker], left)
            took_s, busy_s = self._seconds(worker, size)
            self.busy_s[worker] += busy_s
            heappush(free, (now_s + took_s, worker, size))
            left -= size
            num_batches += 1
            assigned = num_samples - left
            if num_batches == _MOST_JUDGED_BATCHES and left > assigned:
                left_out_s = (left - assigned) * now_s / assigned
                left = assigned
        for _, worker, done in free:
            self._count(worker, done)
        last_s = max(end_s for end_s, _, _ in free)
        self.judged_s += last_s
        return left_out_s + last_s

    def _count(self, worker: int, size: int) -> None:
        spec = self._specs[worker]
        self._updates[worker] += updates_of(spec, size, self._config.beta)
        self.made[worker] += min(spec.threads, size)

    def _seconds_on(
        self, machine: Machine, workload: Workload
    ) -> Callable[[int, int], tuple[float, float]]:
        """Return what gives a batch's seconds, to the end of the next, and those of computing."""
        batch = priced_batches(workload, machine, self._specs, shared=True)

        @cache
        def seconds(worker: int, size: int) -> tuple[float, float]:
            priced, depth = batch(worker, size), self._config.depth_of(self._specs[worker].kind)
            lanes = [stage.on[0].lane for stage in priced[0]]
            computing = zip(lanes, priced[1], strict=True)
            busy_s = sum(one for lane, one in computing if lane is Lane.COMPUTE)
            return period_s(priced, depth), busy_s

        return seconds
