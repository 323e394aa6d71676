"""Steps of synchronous training: computation, and an exchange in host memory.

    gpu0 compute   load fwd1 fwd2 fwd3 | bwd3  bwd2  bwd1                |  step
    gpu0 d2h                                 [d2h 0][d2h 1] [d2h 2]
    host reduce                                     [sum 0][sum 1] [sum 2]
    gpu0 h2d                                               [h2d 0][h2d 1] [h2d 2]

`ComputeStep` plans the first line, common to all strategies; `HostStep` plans all four. A chunk is
a group of layers that follow each other in backward. When the backward of all layers in a chunk has
ended, the chunk's gradients are copied to the host. When all copies have arrived, each host sums
them. A strategy may then exchange the sums between hosts (`Between`). A CPU worker copies its
gradients itself, and reads the result in host memory.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.core.chunks import chunks
from paceline.core.cost import compute_lane, copy_lanes, core_lanes, exchange_lane, update_cost
from paceline.core.machine import Device, DeviceKind, Host, Machine
from paceline.core.plan import ACCUMULATED, Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.transfer import Transfer, lanes_of
from paceline.core.workload import Layer, Workload


@dataclass(frozen=True)
class ComputeStep:
    """The computation of a step: each worker's loading, forward and backward passes, and update."""

    workload: Workload
    devices: tuple[Device, ...]

    @property
    def workers(self) -> range:
        """The indices of all workers."""
        return range(len(self.devices))

    @cached_property
    def load(self) -> Cost:
        """The cost of loading a batch: one read and one write."""
        num_micro_batches = 1 + self.workload.num_accumulated
        return Cost(nbytes=2 * self.workload.input_nbytes * num_micro_batches, num_calls=1)

    @cached_property
    def update(self) -> Cost:
        """The cost of updating all parameters."""
        return update_cost(self.workload)

    def tasks(self, step: int, worker: int) -> Iterator[Task]:
        """Yield a worker's load, forward and backward tasks in one step."""
        on = (compute_lane(self.devices[worker].name),)
        done = TaskId(step, Kind.LOAD, "", worker)
        updated = (TaskId(step - 1, Kind.STEP, "", worker),) if step else ()
        yield Task(done, on, self.load, updated)
        if self.workload.num_accumulated:
            before, done = done, TaskId(step, Kind.FORWARD, ACCUMULATED, worker)
            yield Task(done, on, self.workload.accumulated, (before,))
        for kind, layers in (
            (Kind.FORWARD, self.workload.layers),
            (Kind.BACKWARD, self.workload.in_backward_order),
        ):
            for layer in layers:
                cost = layer.forward if kind is Kind.FORWARD else layer.backward
                before, done = done, TaskId(step, kind, layer.name, worker)
                yield Task(done, on, cost, (before,))

    def after_backward(self, step: int, worker: int) -> TaskId:
        """Return the last task of a worker's backward."""
        last = self.workload.in_backward_order[-1].name
        return TaskId(step, Kind.BACKWARD, last, worker)

    def step_task(self, step: int, worker: int, after: tuple[TaskId, ...]) -> Task:
        """Return a worker's weight update."""
        on = (compute_lane(self.devices[worker].name),)
        return Task(TaskId(step, Kind.STEP, "", worker), on, self.update, after)


# A function that gets a step and the task that sums a chunk on each host. It yields the tasks that
# exchange these sums between hosts, and returns for each host the task that completes the total.
Between = Callable[[int, TaskId], Generator[Task, None, Sequence[TaskId]]]


@dataclass(frozen=True)
class ChunkExchange:
    """The exchange of the gradients of one chunk (adjacent layers), with its resources and costs.

    `last_layer`: layer whose gradients complete the chunk. `synced`: cost of this layer's backward,
    including a synchronisation of the GPU with its host (Le et al. 2018, step B-4-1). `d2h`: each
    worker's copy to its host's memory. `reduce`: the hosts' sums. `between`: the exchange of sums
    between hosts, if any. `places`: index of each worker's host. `h2d`: each worker's copy back;
    None for a CPU worker.
    """

    chunk: str
    last_layer: str
    synced: Cost
    d2h: tuple[Transfer, ...]
    reduce: Transfer
    between: Between | None
    places: tuple[int, ...]
    h2d: tuple[Transfer | None, ...]

    def tasks(self, step: int) -> Generator[Task, None, list[TaskId]]:
        """Yield the tasks after the copies to the hosts: sum, exchange, and copies to GPUs.

        Returns, for each worker, the task after which it has the chunk's summed gradients.
        """
        after = tuple(TaskId(step, Kind.D2H, self.chunk, i) for i in range(len(self.d2h)))
        summed = TaskId(step, Kind.REDUCE, self.chunk)
        yield Task(summed, *self.reduce, after)
        results = [summed] * len(self.places)
        if self.between is not None:
            on_hosts = yield from self.between(step, summed)
            results = [on_hosts[place] for place in self.places]
        for worker, h2d in enumerate(self.h2d):
            if h2d is not None:
                copied = TaskId(step, Kind.H2D, self.chunk, worker)
                yield Task(copied, *h2d, (results[worker],))
                results[worker] = copied
        return results


@dataclass(frozen=True)
class HostStep:
    """A step that exchanges gradients in host memory; `exchanges` is empty for a single worker."""

    compute: ComputeStep
    exchanges: tuple[ChunkExchange, ...]

    def tasks(self, step: int) -> Iterator[Task]:
        """Yield all tasks of a step."""
        completed = {exchange.last_layer: exchange for exchange in self.exchanges}
        for worker, device in enumerate(self.compute.devices):
            for task in self.compute.tasks(step, worker):
                own = task.id
                if own.kind is not Kind.BACKWARD or own.part not in completed:
                    yield task
                    continue
                exchange = completed[own.part]
                on_gpu = device.kind == DeviceKind.GPU
                yield task._replace(cost=exchange.synced) if on_gpu else task
                # The copy follows its layer in the plan, because a backward hook starts the copy.
                copied = TaskId(step, Kind.D2H, exchange.chunk, worker)
                yield Task(copied, *exchange.d2h[worker], (task.id,))
        summed = []
        for exchange in self.exchanges:
            results = yield from exchange.tasks(step)
            summed.append(results)
        for worker in self.compute.workers:
            of_worker = [results[worker] for results in summed]
            after = (*of_worker, self.compute.after_backward(step, worker))
            yield self.compute.step_task(step, worker, after)


@dataclass(frozen=True)
class HostMemory:
    """Plans the workers' copies to and from the memory of their hosts, and the sums there."""

    machine: Machine
    devices: tuple[Device, ...]

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The workers' hosts, each once."""
        return tuple(dict.fromkeys(self.machine.host_of(device) for device in self.devices))

    @cached_property
    def num_ranks(self) -> Counter[str]:
        """The number of workers of each host."""
        return Counter(device.host for device in self.devices)

    def exchanges(
        self,
        workload: Workload,
        size: int,
        between: Callable[[str, Sequence[Layer]], Between] | None,
    ) -> tuple[ChunkExchange, ...]:
        """Return the exchanges of chunks of `size` layers in the order of backward.

        `between` returns a chunk's exchange between hosts, from the chunk's name and layers; it is
        None for a single host. Raises InvalidInput if a GPU is not linked to its host.
        """
        place = {host.name: i for i, host in enumerate(self.hosts)}
        places = tuple(place[device.host] for device in self.devices)
        ready, sum_on, made = workload.in_backward_order, self._held_by_sums(), []
        # Hosts sum concurrently, and a host of n ranks reads n gradients and writes one: so the
        # host with the most ranks determines the time.
        most = max(self.num_ranks.values())
        for i, numbers in enumerate(chunks(len(ready), size)):
            layers = [ready[number] for number in numbers]
            nbytes = sum(layer.gradient_nbytes for layer in layers)
            copies = (self.copies(device, nbytes) for device in self.devices)
            d2h, h2d = zip(*copies, strict=True)
            made.append(
                ChunkExchange(
                    chunk=str(i),
                    last_layer=layers[-1].name,
                    synced=layers[-1].backward + Cost(num_syncs=1),
                    d2h=d2h,
                    reduce=Transfer(sum_on, Cost(nbytes=(most + 1) * nbytes, num_calls=1)),
                    between=between(str(i), layers) if between else None,
                    places=places,
                    h2d=h2d,
                )
            )
        return tuple(made)

    def copies(self, device: Device, nbytes: int) -> tuple[Transfer, Transfer | None]:
        """Return the copy of `nbytes` from `device` to its host, and the copy back.

        For a CPU device, the copy back is None.
        """
        host = self.machine.host_of(device)
        if device.kind == DeviceKind.CPU:
            # Copies read and write each byte; a host's ranks share its memory bandwidth.
            traffic = 2 * self.num_ranks[host.name] * nbytes
            return Transfer(copy_lanes(device), Cost(nbytes=traffic)), None
        there = Resource(device.name, Lane.D2H), *lanes_of(self.machine.route(device, host))
        back = Resource(device.name, Lane.H2D), *lanes_of(self.machine.route(host, device))
        cost = Cost(nbytes=nbytes, num_calls=1)
        return Transfer(there, cost), Transfer(back, cost)

    def _held_by_sums(self) -> tuple[Resource, ...]:
        on: list[Resource] = [Resource(host.name, Lane.REDUCE) for host in self.hosts]
        # A rank reduces one chunk at a time.
        on += [exchange_lane(device.name) for device in self.devices]
        for host in self.hosts:
            link = self.machine.network.within.get(host.name)
            if link is not None and link.uses_cores:
                on += core_lanes([device for device in self.devices if device.host == host.name])
        return tuple(on)
