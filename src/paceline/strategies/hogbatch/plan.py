"""The plan of strategy hogbatch: idle workers train on the next batch (Ma, Rusu et al. 2020).

    cpu0 compute  [fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step]
    gpu0 h2d      [batch 0, model][batch 1, model][batch 2]          [model 2][batch 3]
    gpu0 compute                  [0: fwd  bwd       step][1: fwd  bwd       step][2: fwd
    gpu0 d2h                                              [update 0]              [update 1]
    host reduce                                                     [0]                     [1]

A worker asks the coordinator for work (ScheduleWork), gets a batch of the policy's size
(ExecuteWork), trains on it, and asks again when its update is in the model. Cores update the one
shared model in place, without locks. A GPU copies it in and updates the copy; the update is added
to the model as it is by then. It has `gpu_depth` batches in work, so that copies and sums run
beside the computing: of its own updates, a copy of the model lacks the latest alone, which the GPU
still has. A GPU without other workers beside it keeps the model.

Which worker gets which batch depends on when each is done. So an event loop makes the plan with
the prices of the machine's `Roofline`, in whose order tasks are listed; `simulate` with the same
prices gives the same times. The `step` of a task is the number of its worker's batch.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from math import fsum, inf
from typing import NamedTuple

from paceline.core.cost import Roofline, compute_lane, exchange_lane
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Machine
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.strategy import Window
from paceline.core.transfer import lanes_of
from paceline.core.workload import Workload, feature_nbytes
from paceline.strategies.hogbatch.config import Hogbatch, WorkerSpec
from paceline.strategies.hogbatch.policy import policy_of, updates_of

MODEL = "model"  # the part of a copy of the model to a GPU
HOST = "this-host"  # of the machine that a run measures
_UPDATE_TRAFFIC = 3  # of each parameter: it and its gradient are read, and it is written
_ASKS = -1  # below the places of tasks: a request is answered before work goes on


class Stage(NamedTuple):
    """One task of every batch of a size."""

    kind: Kind
    part: str
    on: tuple[Resource, ...]
    cost: Cost

    def task(self, batch: int, worker: int, size: int, after: tuple[TaskId, ...]) -> Task:
        """Return the task in a worker's batch of that number and size."""
        own = TaskId(batch, self.kind, self.part, worker)
        return Task(own, self.on, self.cost, after, size)


@dataclass(frozen=True)
class BatchCosts:
    """The costs of a worker's batches of any size, from those of the workload's own batch size.

    Arithmetic and the traffic of activations are in proportion to the samples. The traffic of the
    parameters is not: forward reads them, backward reads them and writes their gradients, whatever
    the batch. (The layer with which backward ends only writes: the samples need no gradient.) Each
    thread of a CPU worker does so for its part of the batch, and makes its own update. Neither are
    calls: every operation is launched once.

    A layer's traffic beyond its parameters is taken to be activations. A layer that reads only some
    of its parameters (an embedding) is priced as if it read all that its traffic allows.

    `shared`: True if others train on the model, too.
    """

    workload: Workload
    machine: Machine
    device: Device
    threads: int
    shared: bool

    def stages(self, size: int) -> tuple[Stage, ...]:
        """Return the stages of a batch, each of which waits for the one before.

        InvalidInput if no link leads to a GPU.
        """
        computed = tuple(self._computed(size))
        if self.device.kind == DeviceKind.CPU:
            return computed
        gpu, host = self.device, self.machine.host_of(self.device)
        to_gpu = (Resource(gpu.name, Lane.H2D), *lanes_of(self.machine.route(host, gpu)))
        nbytes = self.workload.input_nbytes * size / self.workload.batch_size
        batch = Stage(Kind.H2D, "batch", to_gpu, Cost(nbytes=nbytes, num_calls=1))
        if not self.shared:
            return (batch, *computed)
        copy = Cost(nbytes=self.workload.gradient_nbytes, num_calls=1)
        to_host = (Resource(gpu.name, Lane.D2H), *lanes_of(self.machine.route(gpu, host)))
        # The host adds what changed in the replica to the model, as that is by then.
        on_host = (exchange_lane(gpu.name), Resource(host.name, Lane.REDUCE))
        add = Cost(nbytes=_UPDATE_TRAFFIC * self.workload.gradient_nbytes, num_calls=1)
        return (
            batch,
            # While the model is copied, none of the GPU's own updates is added to it.
            Stage(Kind.H2D, MODEL, (*to_gpu, exchange_lane(gpu.name)), copy),
            *computed,
            Stage(Kind.D2H, "update", to_host, copy),
            Stage(Kind.REDUCE, "update", on_host, add),
        )

    def _computed(self, size: int) -> Iterator[Stage]:
        on = (compute_lane(self.device.name),)
        for layer in self.workload.layers:
            cost = self._scaled(layer.forward, layer.gradient_nbytes, size)
            yield Stage(Kind.FORWARD, layer.name, on, cost)
        last = self.workload.in_backward_order[-1]
        for layer in self.workload.in_backward_order:
            times = 1 if layer is last else 2
            cost = self._scaled(layer.backward, times * layer.gradient_nbytes, size)
            yield Stage(Kind.BACKWARD, layer.name, on, cost)
        # The update w - eta g, by each thread that has a gradient.
        parts, workload = min(self.threads, size), self.workload
        num_tensors = sum(len(layer.parameters) for layer in workload.layers)
        traffic = _UPDATE_TRAFFIC * workload.gradient_nbytes
        cost = Cost(2 * workload.num_parameters * parts, traffic * parts, num_tensors)
        yield Stage(Kind.STEP, "", on, cost)

    def _scaled(self, cost: Cost, parameter_traffic: int, size: int) -> Cost:
        share = size / self.workload.batch_size
        fixed = min(cost.nbytes, parameter_traffic)
        nbytes = fixed * min(self.threads, size) + (cost.nbytes - fixed) * share
        return Cost(cost.flops * share, nbytes, cost.num_calls, cost.num_syncs)


PricedBatch = tuple[tuple[Stage, ...], tuple[float, ...]]


def priced_batches(
    workload: Workload, machine: Machine, specs: Sequence[WorkerSpec], *, shared: bool
) -> Callable[[int, int], PricedBatch]:
    """Return a function of a worker's position and a size: the batch's stages, and their seconds.

    The workers are on the machine's first devices; seconds are those of its `Roofline`. Each size
    is priced once.
    """
    prices = Roofline.of(machine)
    costs = [
        BatchCosts(workload, machine, device, spec.threads, shared)
        for device, spec in zip(machine.devices, specs, strict=False)
    ]

    @cache
    def batch(worker: int, size: int) -> PricedBatch:
        stages = costs[worker].stages(size)
        tasks = (stage.task(0, worker, size, ()) for stage in stages)
        return stages, tuple(map(prices.seconds, tasks))

    return batch


def period_s(batch: PricedBatch, depth: int) -> float:
    """Return the seconds from one batch's end to the next, with `depth` of them in work at once."""
    stages, seconds = batch
    whole = fsum(seconds)
    if depth == 1:
        return whole
    busy: dict[Resource, float] = defaultdict(float)
    for stage, stage_s in zip(stages, seconds, strict=True):
        for resource in stage.on:
            busy[resource] += stage_s
    # All but the copy of the samples is waited for by the last but one batch after it.
    return max(*busy.values(), (whole - seconds[0]) / (depth - 1), whole / depth)


class BatchTasks:
    """The tasks of one worker's batches, and what each waits for: the stage before it, and others.

    With a `depth` of 1 a batch waits for the one before. With more, the samples of batch n wait for
    the copies of batch n - 1 and the end of batch n - depth, the model for the end of the batch
    after that, and forward for the step of batch n - 1.
    """

    def __init__(self, worker: int, depth: int) -> None:
        self._worker, self._depth, self._number = worker, depth, 0
        self._ends: deque[TaskId] = deque(maxlen=depth)  # of the latest batches
        self._copied: tuple[TaskId, ...] = ()
        self._computed: tuple[TaskId, ...] = ()

    def of(self, stages: Sequence[Stage], size: int) -> list[Task]:
        """Return the tasks of the next batch."""
        made: list[Task] = []
        for stage in stages:
            after = tuple(task.id for task in made[-1:]) + self._others(stage, made)
            made.append(stage.task(self._number, self._worker, size, after))
        self._number += 1
        self._ends.append(made[-1].id)
        self._copied = tuple(task.id for task in made if task.kind is Kind.H2D)[-1:]
        self._computed = tuple(task.id for task in made if task.kind is Kind.STEP)
        return made

    def _others(self, stage: Stage, made: Sequence[Task]) -> tuple[TaskId, ...]:
        """Return the tasks of earlier batches for which a stage waits, given those before it."""
        if self._depth == 1:
            return () if made else self._end_of(1)
        if not made:
            return self._copied + self._end_of(self._depth)
        if stage.part == MODEL:
            return self._end_of(self._depth - 1)
        begins = stage.kind is Kind.FORWARD and made[-1].kind is Kind.H2D
        return self._computed if begins else ()

    def _end_of(self, before: int) -> tuple[TaskId, ...]:
        return (self._ends[-before],) if len(self._ends) >= before else ()


def plan(workload: Workload, machine: Machine, config: Hogbatch, window: Window) -> Plan:
    """Return the tasks done by the time `window` steps of samples have been trained on.

    These are `window.num_steps` batches of the workload's size for each worker, whichever trained
    on them. The plan is a stretch of a run that goes on: batches not done by then are cut off.
    InvalidInput if the machine has fewer devices, they are not of one host, or a GPU is not linked.
    """
    workers = PricedWorkers(workload, machine, config)
    total = window.num_steps * workload.batch_size * config.workers
    return Plan(EventLoop(workers).tasks(num_samples=total))


def memory(workload: Workload, machine: Machine, config: Hogbatch) -> dict[str, int]:
    """Return the bytes that each worker's device, and the host with the shared model, need.

    Each thread of a CPU worker has a gradient of its own. A GPU has a replica, its gradient, the
    model that is copied in, and the change of each batch but the one being copied in. Both hold the
    activations, and a GPU also the samples, of their largest batch. The update is that of plain
    stochastic gradient descent, without momentum. The training data are not counted.
    """
    workers = PricedWorkers(workload, machine, config)
    model, depth = workload.gradient_nbytes, config.gpu_depth
    needed = {machine.host_of(workers.devices[0]).name: model}
    sizes = workers.policy.most
    for device, spec, size in zip(workers.devices, workers.specs, sizes, strict=True):
        largest = size / workload.batch_size
        features = round(feature_nbytes(workload.layers) * largest)
        if device.kind == DeviceKind.CPU:
            needed[device.name] = spec.threads * model + features
        else:
            samples = depth * round(workload.input_nbytes * largest)
            needed[device.name] = (3 + max(1, depth - 1)) * model + features + samples
    return needed


def _spec(machine: Machine, device: Device, config: Hogbatch) -> WorkerSpec:
    """Return the worker on a device; on cores by default with its share of those of its host."""
    if device.kind == DeviceKind.GPU:
        return WorkerSpec(DeviceKind.GPU)
    place = (device.host, DeviceKind.CPU)
    on_host = [other for other in machine.devices if (other.host, other.kind) == place]
    share = max(1, machine.host_of(device).cores // len(on_host))
    return WorkerSpec(DeviceKind.CPU, config.threads or share)


class PricedWorkers:
    """The workers on the first devices of a machine, their policy, and what batches cost them."""

    def __init__(self, workload: Workload, machine: Machine, config: Hogbatch) -> None:
        self.devices = devices = machine.first_devices(config.workers)
        hosts = dict.fromkeys(device.host for device in devices)
        if len(hosts) > 1:
            raise InvalidInput(
                "workers",
                "those of hogbatch share the model in the memory of one host, but "
                f"{devices[0].name!r} is on {devices[0].host!r} and others are on "
                f"{', '.join(map(repr, list(hosts)[1:]))}",
                hint="take the devices of one host",
            )
        self.config = config
        self.specs = [_spec(machine, device, config) for device in devices]
        self.batch = priced_batches(workload, machine, self.specs, shared=len(devices) > 1)
        size = workload.batch_size
        self.depths = [config.depth_of(device.kind) for device in devices]
        speeds = [
            size / period_s(self.batch(worker, size), depth)
            for worker, depth in enumerate(self.depths)
        ]
        self.policy = policy_of(config, self.specs, speeds, size)


class EventLoop:
    """Hands out batches to whichever worker asks first.

    An event is (time, place of a task in the plan, worker): the task is ready, or the worker asks.
    Of equal times the simulator takes the task that is listed first; so does this order.
    """

    def __init__(self, workers: PricedWorkers) -> None:
        self._workers = workers
        numbers = range(len(workers.devices))
        self._events: list[tuple[float, int, int]] = []
        self._updates = [0.0 for _ in numbers]
        self._sizes = [0 for _ in numbers]  # of the latest batch
        self._assigned = [deque[int]() for _ in numbers]  # sizes of the batches in work
        self._batches = [BatchTasks(worker, workers.depths[worker]) for worker in numbers]
        self._free: dict[Resource, float] = defaultdict(float)
        self._tasks: list[Task] = []
        self._seconds: list[float] = []
        self._ends: list[float] = []  # of each task; inf until it has run
        self._waiting: list[int] = []  # how many tasks that have not run each waits for
        self._ready: list[float] = []  # the latest end of those that have
        self._children: dict[TaskId, list[int]] = {}  # of each task that has not run
        self._last: set[int] = set()  # tasks of batches

    def tasks(self, num_samples: float = inf, horizon_s: float = inf) -> Iterator[Task]:
        """Return the tasks up to so many samples, or of all batches that begin before the horizon.

        They are listed one batch after the other, as they are handed out.
        """
        end_s, num_done = inf, 0
        for turn in range(max(self._workers.depths)):
            for worker, depth in enumerate(self._workers.depths):
                if turn < depth:
                    self._hand_out(worker, 0.0)
        while self._events:
            time_s, place, worker = heappop(self._events)
            if place != _ASKS:
                self._proceed(time_s, place, worker)
                continue
            size, spec = self._assigned[worker].popleft(), self._workers.specs[worker]
            num_done += size
            self._updates[worker] += updates_of(spec, size, self._workers.config.beta)
            if num_done >= num_samples:
                end_s = time_s
                break
            if time_s < horizon_s:
                self._hand_out(worker, time_s)
        listed = zip(self._tasks, self._ends, strict=True)
        return (task for task, done_s in listed if done_s <= end_s)

    def _hand_out(self, worker: int, time_s: float) -> None:
        size = self._workers.policy.next_batch(worker, self._expected(worker), self._sizes)
        self._sizes[worker] = size
        self._assigned[worker].append(size)
        stages, seconds = self._workers.batch(worker, size)
        self._seconds += seconds
        for task in self._batches[worker].of(stages, size):
            place = len(self._tasks)
            parents = [one for one in task.after if one in self._children]
            for parent in parents:
                self._children[parent].append(place)
            self._children[task.id] = []
            self._tasks.append(task)
            self._ends.append(inf)
            self._waiting.append(len(parents))
            self._ready.append(time_s)
            if not parents:
                heappush(self._events, (time_s, place, worker))
        self._last.add(len(self._tasks) - 1)

    def _expected(self, worker: int) -> list[float]:
        """Return all updates, as if the worker's batches were done, and others' but the latest."""
        config, found = self._workers.config, []
        for other, (made, assigned) in enumerate(zip(self._updates, self._assigned, strict=True)):
            spec, sizes = self._workers.specs[other], list(assigned)
            counted = sizes if other == worker else sizes[:-1]
            found.append(made + sum(updates_of(spec, size, config.beta) for size in counted))
        return found

    def _proceed(self, time_s: float, place: int, worker: int) -> None:
        """Let a task that waits for none run as soon as what it holds is free."""
        task = self._tasks[place]
        end_s = max(time_s, *(self._free[resource] for resource in task.on)) + self._seconds[place]
        self._free.update(dict.fromkeys(task.on, end_s))
        self._ends[place] = end_s
        for child in self._children.pop(task.id):
            self._waiting[child] -= 1
            self._ready[child] = max(self._ready[child], end_s)
            if not self._waiting[child]:
                heappush(self._events, (self._ready[child], child, worker))
        if place in self._last:
            heappush(self._events, (end_s, _ASKS, worker))
