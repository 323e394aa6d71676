"""The plan of strategy hogbatch: whoever is free trains on the next batch (Ma, Rusu et al. 2020).

    cpu0 compute   [fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step]
    gpu0 h2d       [batch, model]                                         [batch, model]
    gpu0 compute                 [fwd  bwd            step]                             [fwd
    gpu0 d2h                                               [update]
    host reduce                                                    [update]

A worker asks the coordinator for work (ScheduleWork), gets a batch of the size that the policy says
(ExecuteWork), trains on it, and asks again when its update is in the model. Cores update the one
shared model where it is, without locks. A GPU copies it in with its batch and updates the copy; the
update is added to the model as it is by then. A GPU without other workers beside it keeps it.

Who gets which batch depends on who is done when. The plan is therefore made by an event loop with
the prices of the machine's `Roofline`, in whose order tasks are listed; `simulate` with the same
prices gives the same times. Task s3/... @worker1 belongs to worker 1's fourth batch. The `part` of
a STEP is the number of samples in its batch.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from math import fsum, inf
from typing import NamedTuple

from paceline.core.cost import Roofline
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine
from paceline.core.memory import feature_nbytes
from paceline.core.plan import Plan, Resource, Task, task_name
from paceline.core.strategy import Window
from paceline.core.workload import Workload
from paceline.strategies.hogbatch.config import Hogbatch
from paceline.strategies.hogbatch.policy import Counts, Policy, Worker, policy_of, updates_of
from paceline.strategies.hogbatch.work import Stage, Work

_ASKS = -1  # stands before the numbers of batches: who asks is answered before work goes on


def plan(workload: Workload, machine: Machine, config: Hogbatch, window: Window) -> Plan:
    """Return what is done by the time when `window` steps of samples have been trained on.

    That are `window.num_steps` batches of the workload's size for each worker, whoever trained on
    them. It is a stretch of a run that goes on: batches that are at work by then are cut off.
    InvalidInput if the machine has fewer devices, they are not of one host, or a GPU is not linked.
    """
    crew = _Crew(workload, machine, config)
    total = window.num_steps * workload.batch_size * config.workers
    return Plan(_Coordinator(crew, num_samples=total).tasks())


def plan_until(workload: Workload, machine: Machine, config: Hogbatch, horizon_s: float) -> Plan:
    """Return the tasks of all batches that are handed out before the horizon.

    `simulate(plan, cost, until=horizon_s)` then leaves out what is not done by that time. Raises
    ValueError unless the horizon is positive and finite, and InvalidInput as `plan` does.
    """
    if not 0 < horizon_s < inf:
        raise ValueError(f"a horizon is a positive number of seconds, not {horizon_s}")
    crew = _Crew(workload, machine, config)
    return Plan(_Coordinator(crew, horizon_s=horizon_s).tasks())


def memory(workload: Workload, machine: Machine, config: Hogbatch) -> dict[str, int]:
    """Return the bytes that each worker's device, and the host with the shared model, need.

    Each thread of a CPU worker has a gradient of its own, a GPU a replica and its gradient; both
    hold the activations, and a GPU also the samples, of their largest batch. The update is that of
    plain stochastic gradient descent, without momentum. The training data are not counted.
    """
    crew = _Crew(workload, machine, config)
    model = workload.gradient_nbytes
    needed = {machine.host_of(crew.devices[0]).name: model}
    for number, (device, worker) in enumerate(zip(crew.devices, crew.workers, strict=True)):
        largest = crew.policy.largest_batch(number) / workload.batch_size
        features = round(feature_nbytes(workload.layers) * largest)
        if device.kind == "cpu":
            needed[device.name] = worker.threads * model + features
        else:
            needed[device.name] = 2 * model + features + round(workload.input_nbytes * largest)
    return needed


def updates_per_batch(machine: Machine, config: Hogbatch) -> dict[str, float]:
    """Return as how many updates a whole batch of each worker's device counts."""
    return {
        device.name: config.beta * _threads(machine, device, config)
        if device.kind == "cpu"
        else 1.0
        for device in machine.first_devices(config.workers)
    }


def _threads(machine: Machine, device: Device, config: Hogbatch) -> int:
    """Return the threads of a worker: those given, or its share of the cores of its host."""
    if device.kind == "gpu":
        return 1
    on_host = [
        other for other in machine.devices if (other.host, other.kind) == (device.host, "cpu")
    ]
    return config.threads or max(1, machine.host_of(device).cores // len(on_host))


class _Batch(NamedTuple):
    """The stages of a batch of one size on one worker, and the seconds of each."""

    stages: tuple[Stage, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class _Crew:
    """The workers, and what batches cost them: each size is priced once."""

    workload: Workload
    machine: Machine
    config: Hogbatch
    _known: dict[tuple[int, int], _Batch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hosts = dict.fromkeys(device.host for device in self.devices)
        if len(hosts) > 1:
            raise InvalidInput(
                f"workers: those of hogbatch share the model in the memory of one host, but "
                f"{self.devices[0].name!r} is on {self.devices[0].host!r} and others are on "
                f"{', '.join(map(repr, list(hosts)[1:]))}; take the devices of one host"
            )

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return self.machine.first_devices(self.config.workers)

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        size = self.workload.batch_size
        return tuple(
            Worker(
                device.kind,
                _threads(self.machine, device, self.config),
                size / fsum(self.batch(number, size).seconds),
            )
            for number, device in enumerate(self.devices)
        )

    @cached_property
    def policy(self) -> Policy:
        return policy_of(self.config, self.workers, self.workload.batch_size)

    def batch(self, worker: int, size: int) -> _Batch:
        """Return what a batch of that size is to the worker."""
        if (worker, size) not in self._known:
            stages = self._work(worker).stages(size)
            tasks = [Task(stage.label, stage.kind, stage.on, stage.cost) for stage in stages]
            self._known[worker, size] = _Batch(stages, tuple(map(self._prices.seconds, tasks)))
        return self._known[worker, size]

    def updates(self, worker: int, size: int) -> float:
        """Return as how many updates a batch of that size counts."""
        return updates_of(self.workers[worker], size, self.config.beta)

    def _work(self, worker: int) -> Work:
        device = self.devices[worker]
        threads = _threads(self.machine, device, self.config)
        return Work(self.workload, self.machine, device, threads, len(self.devices) > 1)

    @cached_property
    def _prices(self) -> Roofline:
        return Roofline.of(self.machine)


@dataclass
class _Coordinator:
    """Hands out batches until so many samples are done, or until the horizon.

    An event is (time, number of the batch, worker): the worker's next stage is ready, or it asks.
    Of equal times the simulator takes the task that is listed first; so does this order.
    """

    crew: _Crew
    num_samples: float = inf
    horizon_s: float = inf

    def __post_init__(self) -> None:
        workers = range(len(self.crew.devices))
        self._events = [(0.0, _ASKS, worker) for worker in workers]
        self._updates = [0.0 for _ in workers]
        self._sizes = [0 for _ in workers]  # of the latest batch
        self._num_batches = [0 for _ in workers]
        self._num_done = 0  # samples
        self._last: list[tuple[str, ...]] = [() for _ in workers]  # each one's latest task
        self._stages: list[Iterator[tuple[int, float]]] = [iter(()) for _ in workers]
        self._free: dict[Resource, float] = defaultdict(float)
        self._tasks: list[Task] = []
        self._ends: list[float] = []  # of each task; inf until it has run

    def tasks(self) -> Iterator[Task]:
        """Return the tasks, one batch after the other as they are handed out."""
        end_s = self._run()
        return (
            task for task, done_s in zip(self._tasks, self._ends, strict=True) if done_s <= end_s
        )

    def _run(self) -> float:
        """Go through all events, and return by when a task has to end to be listed."""
        heapify(self._events)
        for number in count():
            while self._events and self._events[0][1] != _ASKS:
                self._proceed(*heappop(self._events))
            if not self._events:
                break
            time_s, _, worker = heappop(self._events)
            self._count(worker)
            if self._num_done >= self.num_samples:
                return time_s
            if time_s < self.horizon_s:
                self._hand_out(worker)
                heappush(self._events, (time_s, number, worker))
        return inf

    def _count(self, worker: int) -> None:
        """Count the batch that the worker is done with, if it had one."""
        size = self._sizes[worker]
        self._num_done += size
        self._updates[worker] += self.crew.updates(worker, size)

    def _hand_out(self, worker: int) -> None:
        size = self.crew.policy.next_batch(worker, Counts(self._updates, self._sizes))
        self._sizes[worker] = size
        stages, seconds = self.crew.batch(worker, size)
        first = len(self._tasks)
        for stage in stages:
            name = task_name(self._num_batches[worker], stage.kind, stage.label, worker)
            after = self._last[worker]
            self._tasks.append(Task(name, stage.kind, stage.on, stage.cost, after, stage.part))
            self._last[worker] = (name,)
        self._num_batches[worker] += 1
        self._ends += [inf] * len(stages)
        self._stages[worker] = zip(range(first, len(self._tasks)), seconds, strict=True)

    def _proceed(self, time_s: float, number: int, worker: int) -> None:
        """Let the worker's next stage run as soon as all that it needs is free."""
        following = next(self._stages[worker], None)
        if following is None:
            heappush(self._events, (time_s, _ASKS, worker))
            return
        index, seconds = following
        for resource in self._tasks[index].on:
            time_s = max(time_s, self._free[resource])
        time_s += seconds
        for resource in self._tasks[index].on:
            self._free[resource] = time_s
        self._ends[index] = time_s
        heappush(self._events, (time_s, number, worker))
