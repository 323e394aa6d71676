"""Whether an asynchronous worker helps: the epochs of all with it, and without, before it trains.

Nobody waits for a slow worker but at the end of an epoch, when no samples are left to hand out: the
others then wait for its last batch. That is how one can slow the others down, if an epoch has few
batches. And one that computes on cores that others need gains what those lose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from paceline.core.cost import Roofline
from paceline.core.plan import Task
from paceline.core.workload import Workload
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.fit import Trial, machine_of
from paceline.strategies.hogbatch.policy import Counts, Policy, Worker, policy_of, updates_of
from paceline.strategies.hogbatch.work import Work
from paceline.strategies.hogbatch.workers import WorkerSpec

_GAIN = 1.001  # less is rounding, and no gain
_MOST_EPOCHS = 3  # the first has batches that the policy still changes
_MOST_BATCHES = 5000  # of an epoch, before what lies in its middle is left out


@dataclass(frozen=True)
class Joining:
    """What a worker does for the others: samples a second of all with it, and without."""

    worker: int
    spec: WorkerSpec
    samples_per_s: float
    without_samples_per_s: float

    @property
    def helps(self) -> bool:
        """Whether the others and it are faster than the others."""
        return self.samples_per_s > _GAIN * self.without_samples_per_s

    @property
    def why(self) -> str:
        """One sentence, with the figures."""
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
class Training:
    """What the workers train on: the samples of an epoch, and how many epochs.

    The processors of the machine are `num_cores`; `workload` has the batch size that the learning
    rate was chosen for.
    """

    workload: Workload
    config: Hogbatch
    num_samples: int
    num_epochs: int
    num_cores: int


def judge(training: Training, trials: Sequence[Trial]) -> tuple[Joining, ...]:
    """Say of the slowest worker whether it helps and, while one does not, of the next slowest.

    The last of the verdicts alone may be that one helps; who is faster is taken to help, too. One
    worker is never judged. `trials` were made by all workers at the same time.
    """
    there, verdicts = list(trials), []
    together = rate(training, there)
    while len(there) > 1:
        slowest = min(there, key=_speed)
        others = _unburdened(there, slowest, training.num_cores)
        without = rate(training, others)
        verdicts.append(Joining(slowest.number, slowest.spec, together, without))
        if verdicts[-1].helps:
            break
        there, together = others, without
    return tuple(verdicts)


def _speed(trial: Trial) -> float:
    size = max(trial.seconds)
    return size / trial.seconds[size]


def _unburdened(trials: Sequence[Trial], gone: Trial, num_cores: int) -> list[Trial]:
    """Return the trials without one, on cores for which it no longer competes.

    A stretched worker computes in only a part of its time. Threads share cores evenly.
    """
    left = [trial for trial in trials if trial is not gone]
    before, after = (max(1.0, sum(map(_load, some)) / num_cores) for some in (trials, left))
    return [
        trial
        if trial.spec.kind == "gpu"
        else trial._replace(seconds={n: s * after / before for n, s in trial.seconds.items()})
        for trial in left
    ]


def _load(trial: Trial) -> float:
    """Return how many cores a worker keeps busy; a GPU's worker hardly needs one."""
    return trial.spec.threads / trial.spec.slow if trial.spec.kind == "cpu" else 0.0


def rate(training: Training, trials: Sequence[Trial]) -> float:
    """Return the samples/s of these workers together, whole epochs of which each waits for all."""
    workload, config = training.workload, training.config
    seconds = _prices(workload, trials)
    workers = [Worker(one.spec.kind, one.spec.threads, _speed(one)) for one in trials]
    crew = _Crew(workers, policy_of(config, workers, workload.batch_size), config.beta, seconds)
    num_epochs = min(training.num_epochs, _MOST_EPOCHS)
    took_s = sum(crew.epoch_s(training.num_samples) for _ in range(num_epochs))
    return num_epochs * training.num_samples / took_s


def _prices(workload: Workload, trials: Sequence[Trial]) -> Callable[[int, int], float]:
    """Return what a batch takes a worker, by their position and its size, as in the plan."""
    machine = machine_of(workload, trials)
    prices = Roofline.of(machine)
    works = [
        Work(workload, machine, device, trial.spec.threads, shared=True)
        for device, trial in zip(machine.devices, trials, strict=True)
    ]

    @cache
    def seconds(worker: int, size: int) -> float:
        stages = works[worker].stages(size)
        tasks = (Task(one.label, one.kind, one.on, one.cost, part=one.part) for one in stages)
        return sum(map(prices.seconds, tasks))

    return seconds


class _Crew:
    """Workers of whom whoever is free gets the next samples of the epoch, as the policy says.

    It remembers updates and sizes from one epoch to the next, as the coordinator does.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        policy: Policy,
        beta: float,
        seconds: Callable[[int, int], float],
    ) -> None:
        self._workers, self._policy, self._beta, self._seconds = workers, policy, beta, seconds
        self._updates = [0.0 for _ in workers]
        self._sizes = [0 for _ in workers]  # as the policy last said

    def epoch_s(self, num_samples: int) -> float:
        """Return how long all take for so many samples, to the end of the last batch.

        Of many batches, those in the middle are taken to be like those at the beginning.
        """
        left, num_batches, skipped_s = num_samples, 0, 0.0
        free = [(0.0, worker, 0) for worker in range(len(self._workers))]  # after so many samples
        while left:
            now_s, worker, done = heappop(free)
            self._count(worker, done)
            size = min(self._next(worker), left)
            heappush(free, (now_s + self._seconds(worker, size), worker, size))
            left -= size
            num_batches += 1
            given = num_samples - left
            if num_batches == _MOST_BATCHES and left > given:
                skipped_s = (left - given) * now_s / given
                left = given
        for _, worker, done in free:
            self._count(worker, done)
        return skipped_s + max(end_s for end_s, _, _ in free)

    def _next(self, worker: int) -> int:
        self._sizes[worker] = self._policy.next_batch(worker, Counts(self._updates, self._sizes))
        return self._sizes[worker]

    def _count(self, worker: int, done: int) -> None:
        self._updates[worker] += updates_of(self._workers[worker], done, self._beta)
