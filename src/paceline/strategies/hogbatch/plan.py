"""The plan of strategy hogbatch: idle workers train on the next batch (Ma, Rusu et al. 2020).

    cpu0 compute  [fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step]
    gpu0 h2d      [batch 0, model][batch 1, model][batch 2]          [model 2][batch 3]
    gpu0 compute                  [0: fwd  bwd       step][1: fwd  bwd       step][2: fwd
    gpu0 d2h                                              [update 0]              [update 1]
    host reduce                                                     [0]                     [1]

A worker requests work (ScheduleWork), gets a batch of the policy's size (ExecuteWork) and trains on
it. It requests more work when its update is in the shared model. CPU workers update the shared
model in place, without locks. A GPU trains on a copy, and the host adds the GPU's update to the
shared model. A GPU overlaps `gpu_depth` batches, so that copies and sums run during compute. The
GPU's copy of the model lacks only the GPU's own latest update, which the GPU adds itself. If a GPU
is the only worker, the model stays on it and no updates are copied.

Which worker gets which batch depends on when batches end. So `EventLoop` simulates the run with the
machine's `Roofline` costs while it lists the tasks. `simulate` with the same costs returns the same
times. The `step` of a task is the index of its batch among the worker's batches.
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
from paceline.strategies.hogbatch.policy import policy_of, updates_of

MODEL = "model"  # `part` of the tasks that copy the model to a GPU
HOST = "this-host"  # the host's name in the machine that a run measures
_UPDATE_TRAFFIC = 3  # per parameter byte: parameter and gradient are read, the parameter is written
_ASKS = -1  # below all task indices: at equal times, requests precede tasks


class Stage(NamedTuple):
    """A task that every batch of one size has, such as its copy of the model."""

    kind: Kind
    part: str
    on: tuple[Resource, ...]
    cost: Cost

    def task(self, batch: int, worker: int, size: int, after: tuple[TaskId, ...]) -> Task:
        """Return this stage's task for a worker's batch; `batch`: the batch's number."""
        own = TaskId(batch, self.kind, self.part, worker)
        return Task(own, self.on, self.cost, after, size)


@dataclass(frozen=True)
class BatchCosts:
    """The costs of a worker's batches of any size, scaled from the workload's batch size.

    Flops and activation traffic scale with the number of samples. The number of calls and the
    parameter traffic do not. Forward reads the parameters. Backward reads the parameters and writes
    gradients. The model's first layer only writes gradients, because inputs need no gradient. Each
    thread of a CPU worker has this parameter traffic for its part of the batch, and makes its own
    update. The rest of a layer's traffic is activation traffic. If a layer reads only some
    parameters (embeddings) and has less traffic, all the layer's traffic is parameter traffic.

    `shared`: whether the model is shared with other workers, so that a GPU copies model and update.
    """

    workload: Workload
    machine: Machine
    device: Device
    threads: int
    shared: bool

    def stages(self, size: int) -> tuple[Stage, ...]:
        """Return a batch's stages in order.

        Raises InvalidInput if a GPU has no link to the host.
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
        on_host = (exchange_lane(gpu.name), Resource(host.name, Lane.REDUCE))
        add = Cost(nbytes=_UPDATE_TRAFFIC * self.workload.gradient_nbytes, num_calls=1)
        return (
            batch,
            # The exchange lane keeps this GPU's updates from being added during the copy.
            Stage(Kind.H2D, MODEL, (*to_gpu, exchange_lane(gpu.name)), copy),
            *computed,
            Stage(Kind.D2H, "update", to_host, copy),
            Stage(Kind.REDUCE, "update", on_host, add),
        )

    def _computed(self, size: int) -> Iterator[Stage]:
        on, workload = (compute_lane(self.device.name),), self.workload
        for layer in workload.layers:
            cost = self._scaled(layer.forward, layer.gradient_nbytes, size)
            yield Stage(Kind.FORWARD, layer.name, on, cost)
        last = workload.in_backward_order[-1]
        for layer in workload.in_backward_order:
            times = 1 if layer is last else 2
            cost = self._scaled(layer.backward, times * layer.gradient_nbytes, size)
            yield Stage(Kind.BACKWARD, layer.name, on, cost)
        # Each thread with a gradient applies the update w - eta g.
        parts = min(self.threads, size)
        num_tensors = sum(len(layer.parameters) for layer in workload.layers)
        traffic = _UPDATE_TRAFFIC * workload.gradient_nbytes
        cost = Cost(2 * workload.num_parameters * parts, traffic * parts, num_tensors)
        yield Stage(Kind.STEP, "", on, cost)

    def _scaled(self, cost: Cost, parameter_traffic: int, size: int) -> Cost:
        share = size / self.workload.batch_size
        fixed = min(cost.nbytes, parameter_traffic)
        nbytes = fixed * min(self.threads, size) + (cost.nbytes - fixed) * share
        return Cost(cost.flops * share, nbytes, cost.num_calls, cost.num_syncs)


class BatchTasks:
    """Makes the tasks of one worker's batches, with their dependencies.

    Each stage waits for the previous stage of its batch. With `depth` 1, a batch also waits for the
    end of the previous batch. With a larger `depth`, three stages of batch n also wait for tasks of
    earlier batches:

        copy of the samples    the copies of batch n - 1, and the end of batch n - depth
        copy of the model      the end of batch n - depth + 1
        first layer's forward  the optimizer step of batch n - 1
    """

    def __init__(self, worker: int, depth: int) -> None:
        self._worker, self._depth, self._number = worker, depth, 0
        self._ends: deque[TaskId] = deque(maxlen=depth)  # last tasks of the latest batches
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
        """Return the tasks of earlier batches that `stage` waits for."""
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
    """Plan the batches of `window`, without tasks that end later than the window's last batch.

    A step has the samples of `config.workers` batches of the workload's size; the workers may
    divide these samples in any way. Raises InvalidInput if the machine has fewer devices than
    workers, if the devices are not on one host, or if a GPU has no link to the host.
    """
    workers = PricedWorkers(workload, machine, config)
    total = window.num_steps * workload.batch_size * config.workers
    return Plan(EventLoop(workers).tasks(num_samples=total))


def memory(workload: Workload, machine: Machine, config: Hogbatch) -> dict[str, int]:
    """Return the bytes needed by each worker's device, and by the host for the shared model.

    A CPU worker stores one gradient per thread, and the activations of its largest batch. A GPU
    stores the replica, its gradient, the copy of the shared model, the activations of its largest
    batch, the samples of `gpu_depth` batches, and the changes of `gpu_depth` - 1 batches (at least
    one). Optimizer state and training data are not counted.
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
    """Return the worker of a device.

    Unless `config.threads` is set, the CPU devices of a host divide its cores evenly.
    """
    if device.kind == DeviceKind.GPU:
        return WorkerSpec(DeviceKind.GPU)
    place = (device.host, DeviceKind.CPU)
    on_host = [other for other in machine.devices if (other.host, other.kind) == place]
    share = max(1, machine.host_of(device).cores // len(on_host))
    return WorkerSpec(DeviceKind.CPU, config.threads or share)


class PricedWorkers:
    """The workers on a machine's first devices, their policy, and the costs of their batches.

    `specs`: the workers of a run, whose GPUs always copy the shared model. Without `specs`, there
    are `config.workers` workers, and a GPU that is the only worker does not copy the model.
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
            raise InvalidInput(
                "workers",
                f"must be on one host, but machine {machine.name!r} has these devices on "
                f"{', '.join(hosts)}",
                got=config.workers,
            )
        self.config, self.devices = config, devices
        self.specs = specs or [_spec(machine, device, config) for device in devices]
        self.depths = [config.depth_of(device.kind) for device in devices]
        shared = specs is not None or len(devices) > 1
        self._costs = [
            BatchCosts(workload, machine, device, spec.threads, shared)
            for device, spec in zip(devices, self.specs, strict=True)
        ]
        self._prices, self.batch = Roofline.of(machine), cache(self._batch)
        size = workload.batch_size
        speeds = [size / self.period_s(worker, size) for worker in range(len(devices))]
        self.policy = policy_of(config, self.specs, speeds, size)

    def _batch(self, worker: int, size: int) -> tuple[tuple[Stage, ...], tuple[float, ...]]:
        """Return a batch's stages, and the seconds that each stage takes."""
        stages = self._costs[worker].stages(size)
        tasks = (stage.task(0, worker, size, ()) for stage in stages)
        return stages, tuple(map(self._prices.seconds, tasks))

    def period_s(self, worker: int, size: int) -> float:
        """Return the seconds between the ends of successive batches of a worker."""
        stages, seconds = self.batch(worker, size)
        depth, whole = self.depths[worker], fsum(seconds)
        if depth == 1:
            return whole
        busy: dict[Resource, float] = defaultdict(float)
        for stage, stage_s in zip(stages, seconds, strict=True):
            for resource in stage.on:
                busy[resource] += stage_s
        # The copy of the model for batch n + depth - 1 waits for the end of batch n.
        return max(*busy.values(), (whole - seconds[0]) / (depth - 1), whole / depth)


class BatchSizes:
    """Asks the policy for batch sizes and counts updates, like the coordinator of a run."""

    def __init__(self, workers: PricedWorkers) -> None:
        self._workers = workers
        self._updates = [0.0 for _ in workers.specs]
        self._latest = [0 for _ in workers.specs]
        self._assigned = [deque[int]() for _ in workers.specs]

    def next(self, worker: int, left: float = inf) -> int:
        """Return the size of a worker's next batch, at most `left`."""
        self._latest[worker] = self._workers.policy.next_batch(
            worker, self._expected(worker), self._latest
        )
        size = int(min(self._latest[worker], left))
        self._assigned[worker].append(size)
        return size

    def complete(self, worker: int) -> int:
        """Count a worker's oldest assigned batch as done; return its size.

        Returns 0 if no batch is assigned to the worker.
        """
        size = self._assigned[worker].popleft() if self._assigned[worker] else 0
        self._updates[worker] += self._updates_of(worker, size)
        return size

    def _updates_of(self, worker: int, size: int) -> float:
        return updates_of(self._workers.specs[worker], size, self._workers.config.beta)

    def _expected(self, worker: int) -> list[float]:
        """Return the updates that each worker will have made when `worker` begins its next batch.

        Assumes that by then `worker` completes all its assigned batches, and that every other
        worker completes all but the newest assigned batch.
        """
        found = []
        for other, (made, assigned) in enumerate(zip(self._updates, self._assigned, strict=True)):
            counted = list(assigned) if other == worker else list(assigned)[:-1]
            found.append(made + sum(self._updates_of(other, size) for size in counted))
        return found


class EventLoop:
    """Simulates a run: the next batch goes to the worker that first requests work.

    An event is (time, task's index in the plan, worker): at this time the task is ready. If the
    index is `_ASKS`, the worker requests work instead. Tasks that are ready at the same time start
    in the plan's order, as in the simulator.
    """

    def __init__(self, workers: PricedWorkers) -> None:
        self._workers, self._sizes = workers, BatchSizes(workers)
        self._batches = [BatchTasks(worker, depth) for worker, depth in enumerate(workers.depths)]
        self._events: list[tuple[float, int, int]] = []
        self._free_s: dict[Resource, float] = defaultdict(float)
        self._tasks: list[Task] = []
        self._seconds: list[float] = []
        self._ends_s: dict[TaskId, float] = {}  # end times of started tasks
        self._waiting: dict[int, int] = {}  # number of unstarted parents of each task
        self._children: dict[TaskId, list[int]] = defaultdict(list)
        self._last: set[int] = set()  # index of each batch's last task

    def tasks(self, num_samples: float = inf, horizon_s: float = inf) -> Iterator[Task]:
        """Return the tasks, batch by batch, in the order in which batches are assigned.

        `num_samples`: the run ends after this number of samples; tasks that end later are left out.
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
            num_done += self._sizes.complete(worker)
            if num_done >= num_samples:
                end_s = time_s
                break
            if time_s < horizon_s:
                self._hand_out(worker, time_s)
        return (task for task in self._tasks if self._ends_s.get(task.id, inf) <= end_s)

    def _hand_out(self, worker: int, time_s: float) -> None:
        size = self._sizes.next(worker)
        stages, seconds = self._workers.batch(worker, size)
        self._seconds += seconds
        for task in self._batches[worker].of(stages, size):
            place = len(self._tasks)
            self._tasks.append(task)
            unstarted = [one for one in task.after if one not in self._ends_s]
            for parent in unstarted:
                self._children[parent].append(place)
            if unstarted:
                self._waiting[place] = len(unstarted)
            else:
                self._ready(time_s, place, worker)
        self._last.add(len(self._tasks) - 1)

    def _ready(self, time_s: float, place: int, worker: int) -> None:
        """Queue a task for the time when its parents end; all parents must have started."""
        ends_s = (self._ends_s[one] for one in self._tasks[place].after)
        heappush(self._events, (max(time_s, *ends_s, 0.0), place, worker))

    def _start(self, time_s: float, place: int, worker: int) -> None:
        """Simulate a ready task, which runs as soon as its resources are free."""
        task = self._tasks[place]
        free_s = max(self._free_s[resource] for resource in task.on)
        end_s = max(time_s, free_s) + self._seconds[place]
        self._free_s.update(dict.fromkeys(task.on, end_s))
        self._ends_s[task.id] = end_s
        for child in self._children.pop(task.id, ()):
            self._waiting[child] -= 1
            if not self._waiting[child]:
                self._ready(end_s, child, worker)
        if place in self._last:
            heappush(self._events, (end_s, _ASKS, worker))
