"""The plan of strategy hogbatch: idle workers train on the next batch (Ma, Rusu et al. 2020).

    cpu0 compute  [fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step]
    gpu0 h2d      [batch 0, model][batch 1, model][batch 2]          [model 2][batch 3]
    gpu0 compute                  [0: fwd  bwd       step][1: fwd  bwd       step][2: fwd
    gpu0 d2h                                              [update 0]              [update 1]
    host reduce                                                     [0]                     [1]

A worker requests its next batch when its update is in the shared model. CPU workers update the
shared model in place, without locks. A GPU, even if it is the only worker, trains on a copy and
overlaps `gpu_depth` batches. The host adds its updates to the shared model.

Which worker gets which batch depends on when batches end. So `EventLoop` simulates the run while it
lists the tasks; `simulate` with the machine's `Roofline` costs returns the same times. The `step`
of a task is the index of its batch among the worker's batches.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
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
from paceline.strategies.hogbatch.policy import policy_of

MODEL = "model"  # `part` of the tasks that copy the model to a GPU
HOST = "this-host"  # the host's name in the machine description that a run measures
_UPDATE_TRAFFIC = 3  # per parameter byte: parameter and gradient are read, the parameter is written
_ASKS = -1  # event index of a work request; the lowest, so at equal times requests precede tasks


def computed(workload: Workload, threads: int, size: int) -> Iterator[tuple[Kind, str, Cost]]:
    """Yield kind, part and cost of a batch's compute tasks, scaled from the workload's batch size.

    Flops and activation traffic scale with the number of samples; the number of calls does not.
    Parameter traffic scales with the number of threads. Each thread reads the parameters in
    forward, reads them and writes gradients in backward, and makes its own update. In the first
    layer, backward only writes gradients, because inputs need no gradient. All other traffic of a
    layer is activation traffic. An embedding, which reads only some of its parameters, may have
    only parameter traffic.
    """
    share, parts = size / workload.batch_size, min(threads, size)

    def scaled(cost: Cost, parameter_traffic: int) -> Cost:
        fixed = min(cost.nbytes, parameter_traffic)
        nbytes = fixed * parts + (cost.nbytes - fixed) * share
        return Cost(cost.flops * share, nbytes, cost.num_calls, cost.num_syncs)

    for layer in workload.layers:
        yield Kind.FORWARD, layer.name, scaled(layer.forward, layer.gradient_nbytes)
    last = workload.in_backward_order[-1]
    for layer in workload.in_backward_order:
        times = 1 if layer is last else 2
        yield Kind.BACKWARD, layer.name, scaled(layer.backward, times * layer.gradient_nbytes)
    # Each thread with a gradient applies the update w - eta g.
    num_tensors = sum(len(layer.parameters) for layer in workload.layers)
    traffic = _UPDATE_TRAFFIC * workload.gradient_nbytes
    yield Kind.STEP, "", Cost(2 * workload.num_parameters * parts, traffic * parts, num_tensors)


@dataclass(frozen=True)
class BatchCosts:
    """The costs of a worker's batches of any size."""

    worker: int
    workload: Workload
    machine: Machine
    device: Device
    threads: int

    def tasks(self, size: int) -> list[Task]:
        """Return, in order, the tasks of the worker's first batch, without dependencies."""
        device, host = self.device, self.machine.host_of(self.device)
        compute, exchange = compute_lane(device.name), exchange_lane(device.name)

        def task(kind: Kind, part: str, cost: Cost, *on: Resource) -> Task:
            return Task(TaskId(0, kind, part, self.worker), on, cost, (), size)

        stages = computed(self.workload, self.threads, size)
        training = [task(*stage, compute) for stage in stages]
        if device.kind == DeviceKind.CPU:
            return training
        to_gpu = (Resource(device.name, Lane.H2D), *lanes_of(self.machine.route(host, device)))
        nbytes = self.workload.input_nbytes * size / self.workload.batch_size
        samples = task(Kind.H2D, "batch", Cost(nbytes=nbytes, num_calls=1), *to_gpu)
        nbytes = self.workload.gradient_nbytes
        copied, added = (Cost(nbytes=n * nbytes, num_calls=1) for n in (1, _UPDATE_TRAFFIC))
        to_host = (Resource(device.name, Lane.D2H), *lanes_of(self.machine.route(device, host)))
        return [
            samples,
            # Occupy the resource `exchange`, too, so that no update is added during this copy.
            task(Kind.H2D, MODEL, copied, *to_gpu, exchange),
            *training,
            task(Kind.D2H, "update", copied, *to_host),
            task(Kind.REDUCE, "update", added, exchange, Resource(host.name, Lane.REDUCE)),
        ]


class BatchTasks:
    """Makes the tasks of a worker's batches, with their dependencies.

    Each task waits for the previous task of its batch. With `depth` 1, a batch also waits for the
    end of the previous batch. With a larger `depth`, three tasks of batch n also wait for tasks of
    earlier batches:

        copy of the samples    the copies of batch n - 1, and the end of batch n - depth
        copy of the model      the end of batch n - depth + 1
        first layer's forward  the optimizer step of batch n - 1
    """

    def __init__(self, depth: int) -> None:
        self._depth, self._number = depth, 0
        self._latest: deque[list[Task]] = deque(maxlen=depth)  # tasks of the latest batches

    def next(self, first: Sequence[Task]) -> list[Task]:
        """Return the next batch's tasks; `first`: the result of `BatchCosts.tasks` for its size."""
        made: list[Task] = []
        for task in first:
            after = tuple(one.id for one in made[-1:]) + self._others(task, made)
            made.append(task._replace(id=task.id._replace(step=self._number), after=after))
        self._number += 1
        self._latest.append(made)
        return made

    def _others(self, task: Task, made: Sequence[Task]) -> tuple[TaskId, ...]:
        """Return earlier batches' tasks that `task` awaits; `made`: its batch's preceding tasks."""
        if not made:
            return self._last(1, Kind.H2D) + self._last(self._depth)
        if task.part == MODEL:
            return self._last(self._depth - 1)
        begins = task.kind is Kind.FORWARD and made[-1].kind is Kind.H2D
        return self._last(1, Kind.STEP) if begins else ()

    def _last(self, before: int, kind: Kind | None = None) -> tuple[TaskId, ...]:
        """Return the last task (of `kind`) in the `before`-th latest batch; () if none."""
        batch = self._latest[-before] if 0 < before <= len(self._latest) else []
        return tuple(task.id for task in batch if kind in (None, task.kind))[-1:]


def plan(workload: Workload, machine: Machine, config: Hogbatch, window: Window) -> Plan:
    """Plan the batches of `window.num_steps` steps, without tasks that end after the last batch.

    A step has as many samples as `config.workers` batches of the workload; the policy divides these
    samples into batches. Raises InvalidInput if the machine has fewer devices than workers, if the
    devices are not on one host, or if a GPU has no link to the host.
    """
    total = window.num_steps * workload.batch_size * config.workers
    return Plan(EventLoop(PricedWorkers(workload, machine, config)).tasks(num_samples=total))


def memory(workload: Workload, machine: Machine, config: Hogbatch) -> dict[str, int]:
    """Return the bytes needed on each worker's device, and on the host for the shared model.

    A worker stores the activations of its largest batch. A CPU worker also stores a gradient per
    thread. A GPU also stores its replica, a gradient, a copy of the shared model, the samples of
    `gpu_depth` batches, and the updates of `gpu_depth` - 1 batches (at least one).
    """
    workers = PricedWorkers(workload, machine, config)
    model, depth = workload.gradient_nbytes, config.gpu_depth
    needed = {machine.host_of(workers.devices[0]).name: model}
    for device, spec, size in zip(workers.devices, workers.specs, workers.policy.most, strict=True):
        largest = size / workload.batch_size
        features = round(feature_nbytes(workload.layers) * largest)
        if device.kind == DeviceKind.CPU:
            needed[device.name] = spec.threads * model + features
        else:
            samples = depth * round(workload.input_nbytes * largest)
            needed[device.name] = (3 + max(1, depth - 1)) * model + features + samples
    return needed


def _spec(machine: Machine, device: Device, config: Hogbatch) -> WorkerSpec:
    """Return a device's `WorkerSpec`; by default, a host's CPU devices divide its cores evenly."""
    if device.kind == DeviceKind.GPU:
        return WorkerSpec(DeviceKind.GPU)
    place = (device.host, device.kind)
    num_sharing = sum((other.host, other.kind) == place for other in machine.devices)
    share = max(1, machine.host_of(device).cores // num_sharing)
    return WorkerSpec(DeviceKind.CPU, config.threads or share)


class PricedBatch(NamedTuple):
    """The tasks of a worker's batch of `size` samples, and the seconds of each task.

    `period_s`: seconds between the ends of successive batches. `computing_s`: sum of the seconds of
    the compute tasks.
    """

    size: int
    tasks: list[Task]
    seconds: tuple[float, ...]
    period_s: float
    computing_s: float


class PricedWorkers:
    """Simulates how the coordinator assigns batches to workers on a machine's first devices.

    `specs`: the workers of a real run; None: plan `config.workers` workers. `batch(worker, size)`
    returns a worker's `PricedBatch`. `num_updates`: each worker's number of updates so far.
    `computing_s`: for each worker, the sum of `PricedBatch.computing_s` so far.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        config: Hogbatch,
        specs: Sequence[WorkerSpec] | None = None,
    ) -> None:
        devices = machine.first_devices(config.workers if specs is None else len(specs))
        hosts = dict.fromkeys(device.host for device in devices)
        if len(hosts) > 1:
            devices_on = f"machine {machine.name!r} has these devices on {', '.join(hosts)}"
            problem = f"must be on one host, but {devices_on}"
            raise InvalidInput("workers", problem, got=config.workers)
        self.devices, self._config = devices, config
        self.specs = specs or [_spec(machine, device, config) for device in devices]
        self.depths = [config.depth_of(device.kind) for device in devices]
        self._costs = [
            BatchCosts(worker, workload, machine, device, spec.threads)
            for worker, (device, spec) in enumerate(zip(devices, self.specs, strict=True))
        ]
        self._prices, size = Roofline.of(machine), workload.batch_size
        self.batch = cache(self._priced)
        speeds = [size / self.batch(worker, size).period_s for worker in range(len(devices))]
        self.policy = policy_of(config, self.specs, speeds, size)
        self.num_updates, self._latest = [0] * len(devices), [0] * len(devices)
        self.computing_s = [0.0] * len(devices)
        self._assigned = [deque[int]() for _ in devices]

    def _priced(self, worker: int, size: int) -> PricedBatch:
        tasks, depth = self._costs[worker].tasks(size), self.depths[worker]
        seconds = tuple(map(self._prices.seconds, tasks))
        busy: dict[Resource, float] = defaultdict(float)
        for task, task_s in zip(tasks, seconds, strict=True):
            for resource in task.on:
                busy[resource] += task_s
        period_s = whole_s = fsum(seconds)
        if depth > 1:
            # Batch n + depth - 1 copies its samples early, but all its other tasks follow the end
            # of batch n. So depth - 1 periods last at least as long as these other tasks.
            most_s = (whole_s - seconds[0]) / (depth - 1)
            period_s = max(*busy.values(), most_s, whole_s / depth)
        computing_s = busy[compute_lane(self.devices[worker].name)]
        return PricedBatch(size, tasks, seconds, period_s, computing_s)

    def next_batch(self, worker: int, left: float = inf) -> PricedBatch:
        """Assign and return a worker's next batch of at most `left` samples."""
        self._latest[worker] = self.policy.next_batch(worker, self._expected(worker), self._latest)
        size = int(min(self._latest[worker], left))
        self._assigned[worker].append(size)
        batch = self.batch(worker, size)
        self.computing_s[worker] += batch.computing_s
        return batch

    def complete(self, worker: int) -> int:
        """Count a worker's oldest batch as done; return its size, or 0 if none is assigned."""
        size = self._assigned[worker].popleft() if self._assigned[worker] else 0
        self.num_updates[worker] += self.specs[worker].num_updates(size)
        return size

    def _expected(self, worker: int) -> list[float]:
        """Estimate how many updates each worker will have made when `worker` begins its next batch.

        Assumes that by then `worker` has completed all its assigned batches, and that each other
        worker has completed all but its newest. `Hogbatch.weighted` weights the numbers.
        """
        found = []
        for other, (spec, assigned) in enumerate(zip(self.specs, self._assigned, strict=True)):
            ahead = list(assigned) if other == worker else list(assigned)[:-1]
            num_updates = self.num_updates[other] + sum(map(spec.num_updates, ahead))
            found.append(self._config.weighted(spec, num_updates))
        return found


class EventLoop:
    """Simulates a run: the next batch goes to the worker that first requests work.

    An event (time, index, worker) means that at this time the plan's task with this index is ready,
    or, if the index is `_ASKS`, that the worker requests work. Tasks that are ready
    at the same time start in the plan's order, as in the simulator.
    """

    def __init__(self, workers: PricedWorkers) -> None:
        self._workers = workers
        self._batches = [BatchTasks(depth) for depth in workers.depths]
        self._events: list[tuple[float, int, int]] = []
        self._free_s: dict[Resource, float] = defaultdict(float)
        self._tasks: list[Task] = []
        self._seconds: list[float] = []  # seconds of each task
        self._ends_s: dict[TaskId, float] = {}  # end times of started tasks
        self._children: dict[TaskId, list[int]] = defaultdict(list)
        self._last: set[int] = set()  # index of each batch's last task

    def tasks(self, num_samples: float = inf, horizon_s: float = inf) -> Iterator[Task]:
        """Return the tasks, batch by batch, in the order in which batches are assigned.

        `num_samples`: the run ends once this number of samples is done; tasks that end after the
        run are left out.
        `horizon_s`: no batch is assigned at or after this time.
        """
        end_s, num_done = inf, 0
        for turn in range(max(self._workers.depths)):
            for worker, depth in enumerate(self._workers.depths):
                if turn < depth:
                    self._hand_out(worker, 0.0)
        while self._events:
            time_s, place, worker = heappop(self._events)
            if place != _ASKS:
                self._start(time_s, place, worker)
                continue
            num_done += self._workers.complete(worker)
            if num_done >= num_samples:
                end_s = time_s
                break
            if time_s < horizon_s:
                self._hand_out(worker, time_s)
        return (task for task in self._tasks if self._ends_s.get(task.id, inf) <= end_s)

    def _hand_out(self, worker: int, time_s: float) -> None:
        batch = self._workers.next_batch(worker)
        self._seconds += batch.seconds
        for task in self._batches[worker].next(batch.tasks):
            for parent in task.after:
                self._children[parent].append(len(self._tasks))
            self._tasks.append(task)
            self._queue_if_ready(time_s, len(self._tasks) - 1, worker)
        self._last.add(len(self._tasks) - 1)

    def _queue_if_ready(self, time_s: float, place: int, worker: int) -> None:
        """Queue task number `place` if the end times of all its parents are known."""
        after = self._tasks[place].after
        if all(parent in self._ends_s for parent in after):
            ready_s = max([time_s, *(self._ends_s[parent] for parent in after)])
            heappush(self._events, (ready_s, place, worker))

    def _start(self, time_s: float, place: int, worker: int) -> None:
        """Start task number `place` when its resources are free, at `time_s` at the earliest."""
        task = self._tasks[place]
        end_s = max([time_s, *(self._free_s[resource] for resource in task.on)])
        end_s += self._seconds[place]
        self._free_s.update(dict.fromkeys(task.on, end_s))
        self._ends_s[task.id] = end_s
        for child in self._children.pop(task.id, ()):
            self._queue_if_ready(end_s, child, worker)
        if place in self._last:
            heappush(self._events, (end_s, _ASKS, worker))
