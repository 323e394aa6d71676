"""The plan of strategy hogbatch: idle workers train on the next batch (Ma, Rusu et al. 2020).

    cpu0 compute   [fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step][fwd bwd step]
    gpu0 h2d       [batch, model]                                         [batch, model]
    gpu0 compute                 [fwd  bwd            step]                             [fwd
    gpu0 d2h                                               [update]
    host reduce                                                    [update]

A worker asks the coordinator for work (ScheduleWork), gets a batch of the policy's size
(ExecuteWork), trains on it, and asks again when its update is in the model. Cores update the one
shared model in place, without locks. A GPU copies it in with its batch and updates the copy; the
update is added to the model as it is by then. A GPU without other workers beside it keeps it.

Which worker gets which batch depends on when each is done. So an event loop makes the plan with
the prices of the machine's `Roofline`, in whose order tasks are listed; `simulate` with the same
prices gives the same times. The `step` of a task is the number of its worker's batch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import count
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
_ASKS = -1  # below the numbers of batches: a request is answered before work goes on


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
            Stage(Kind.H2D, MODEL, to_gpu, copy),
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


def plan(workload: Workload, machine: Machine, config: Hogbatch, window: Window) -> Plan:
    """Return the tasks done by the time `window` steps of samples have been trained on.

    These are `window.num_steps` batches of the workload's size for each worker, whichever trained
    on them. The plan is a stretch of a run that goes on: batches not done by then are cut off.
    InvalidInput if the machine has fewer devices, they are not of one host, or a GPU is not linked.
    """
    workers = _PricedWorkers(workload, machine, config)
    total = window.num_steps * workload.batch_size * config.workers
    return Plan(_EventLoop(workers).tasks(num_samples=total))


def plan_until(workload: Workload, machine: Machine, config: Hogbatch, horizon_s: float) -> Plan:
    """Return the tasks of all batches that are handed out before the horizon.

    `simulate(plan, cost, until=horizon_s)` then leaves out what is not done by that time. Raises
    ValueError unless the horizon is positive and finite, and InvalidInput as `plan` does.
    """
    if not 0 < horizon_s < inf:
        raise ValueError(f"a horizon is a positive number of seconds, not {horizon_s}")
    workers = _PricedWorkers(workload, machine, config)
    return Plan(_EventLoop(workers).tasks(horizon_s=horizon_s))


def memory(workload: Workload, machine: Machine, config: Hogbatch) -> dict[str, int]:
    """Return the bytes that each worker's device, and the host with the shared model, need.

    Each thread of a CPU worker has a gradient of its own, a GPU a replica and its gradient; both
    hold the activations, and a GPU also the samples, of their largest batch. The update is that of
    plain stochastic gradient descent, without momentum. The training data are not counted.
    """
    workers = _PricedWorkers(workload, machine, config)
    model = workload.gradient_nbytes
    needed = {machine.host_of(workers.devices[0]).name: model}
    sizes = workers.policy.most
    for device, spec, size in zip(workers.devices, workers.specs, sizes, strict=True):
        largest = size / workload.batch_size
        features = round(feature_nbytes(workload.layers) * largest)
        if device.kind == DeviceKind.CPU:
            needed[device.name] = spec.threads * model + features
        else:
            needed[device.name] = 2 * model + features + round(workload.input_nbytes * largest)
    return needed


def updates_per_batch(machine: Machine, config: Hogbatch) -> dict[str, float]:
    """Return the number of updates that a whole batch of each worker's device counts for."""
    return {
        device.name: updates_of(_spec(machine, device, config), inf, config.beta)
        for device in machine.first_devices(config.workers)
    }


def _spec(machine: Machine, device: Device, config: Hogbatch) -> WorkerSpec:
    """Return the worker on a device; on cores by default with its share of those of its host."""
    if device.kind == DeviceKind.GPU:
        return WorkerSpec(DeviceKind.GPU)
    place = (device.host, DeviceKind.CPU)
    on_host = [other for other in machine.devices if (other.host, other.kind) == place]
    share = max(1, machine.host_of(device).cores // len(on_host))
    return WorkerSpec(DeviceKind.CPU, config.threads or share)


class _PricedWorkers:
    """The workers on the first devices of a machine, their policy, and what batches cost them."""

    def __init__(self, workload: Workload, machine: Machine, config: Hogbatch) -> None:
        self.devices = devices = machine.first_devices(config.workers)
        hosts = dict.fromkeys(device.host for device in devices)
        if len(hosts) > 1:
            raise InvalidInput(
                f"workers: those of hogbatch share the model in the memory of one host, but "
                f"{devices[0].name!r} is on {devices[0].host!r} and others are on "
                f"{', '.join(map(repr, list(hosts)[1:]))}; take the devices of one host"
            )
        self.config = config
        self.specs = [_spec(machine, device, config) for device in devices]
        self.batch = priced_batches(workload, machine, self.specs, shared=len(devices) > 1)
        size = workload.batch_size
        speeds = [size / fsum(self.batch(worker, size)[1]) for worker in range(len(devices))]
        self.policy = policy_of(config, self.specs, speeds, size)


class _EventLoop:
    """Hands out batches to whichever worker asks first.

    An event is (time, number of the batch, worker): the worker's next stage is ready, or it asks.
    Of equal times the simulator takes the task that is listed first; so does this order.
    """

    def __init__(self, workers: _PricedWorkers) -> None:
        self._workers = workers
        numbers = range(len(workers.devices))
        self._events = [(0.0, _ASKS, worker) for worker in numbers]
        self._updates = [0.0 for _ in numbers]
        self._sizes = [0 for _ in numbers]  # of the latest batch
        self._num_batches = [0 for _ in numbers]
        self._last: list[tuple[TaskId, ...]] = [() for _ in numbers]  # each one's latest task
        self._stages: list[Iterator[tuple[int, float]]] = [iter(()) for _ in numbers]
        self._free: dict[Resource, float] = defaultdict(float)
        self._tasks: list[Task] = []
        self._ends: list[float] = []  # of each task; inf until it has run

    def tasks(self, num_samples: float = inf, horizon_s: float = inf) -> Iterator[Task]:
        """Return the tasks up to so many samples, or of all batches that begin before the horizon.

        They are listed one batch after the other, as they are handed out.
        """
        end_s, num_done = inf, 0
        for number in count():
            while self._events and self._events[0][1] != _ASKS:
                self._proceed(*heappop(self._events))
            if not self._events:
                break
            time_s, _, worker = heappop(self._events)
            size, spec = self._sizes[worker], self._workers.specs[worker]  # 0 at first
            num_done += size
            self._updates[worker] += updates_of(spec, size, self._workers.config.beta)
            if num_done >= num_samples:
                end_s = time_s
                break
            if time_s < horizon_s:
                self._hand_out(worker)
                heappush(self._events, (time_s, number, worker))
        listed = zip(self._tasks, self._ends, strict=True)
        return (task for task, done_s in listed if done_s <= end_s)

    def _hand_out(self, worker: int) -> None:
        size = self._workers.policy.next_batch(worker, self._updates, self._sizes)
        self._sizes[worker] = size
        stages, seconds = self._workers.batch(worker, size)
        first = len(self._tasks)
        for stage in stages:
            task = stage.task(self._num_batches[worker], worker, size, self._last[worker])
            self._tasks.append(task)
            self._last[worker] = (task.id,)
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
        held = self._tasks[index].on
        end_s = max(time_s, *(self._free[resource] for resource in held)) + seconds
        self._free.update(dict.fromkeys(held, end_s))
        self._ends[index] = end_s
        heappush(self._events, (end_s, number, worker))
