"""The plan of strategy local: rounds of inner steps, and an exchange of outer gradients by a hub.

    worker 0 compute   train 0        | beside 1 | step 0 | train 1        | beside 0 | step 1 ...
    to the hub                        [up 0 ]                              [up 1 ]
    from the hub                              [down 0]                            [down 1]
    hub                                       [sum 0]                             [sum 1]

A step of the plan is a round. In it each worker takes as many inner steps as it is to take, and
sends each fragment of the model once: the first of two after half of them. While a fragment travels
the worker takes up to `delay` further steps; then it decodes what all workers have sent, takes the
outer step, and goes on. Without a delay it waits. The hub hands each payload on to all workers but
its own sender, when all are there, and takes the same outer step beside them.

A task has the round in which its fragment was sent, even if the next one has begun.
"""

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Host, Machine, Station, codec_speed
from paceline.core.plan import Cost, Kind, Lane, Plan, Resource, Task, TaskId
from paceline.core.step import ComputeStep
from paceline.core.strategy import Window
from paceline.core.transfer import Transfer, lanes_of
from paceline.core.wire_format import pieces, wire_format
from paceline.core.workload import Layer, Workload, replica_nbytes
from paceline.strategies.local.config import Local
from paceline.strategies.local.units import inner_steps
from paceline.strategies.local.ways import Stage, Ways, following

FLOAT32_NBYTES = 4  # of a value of the outer state, and of an outer gradient without a codec
# Vectors that an outer step reads and writes: the mean outer gradient, the momentum twice, the
# parameters twice.
_OUTER_TRAFFIC = 5
_GRADIENT_TRAFFIC = 4  # of an outer gradient: two are read and one is written, and looked at
_LOADED_TRAFFIC = 2  # by a worker, of the group's parameters into its own
# By the hub, which looks at what has come, and copies it for the others; and decodes it before.
_TAKEN_TRAFFIC, _DECODED_TRAFFIC = 3, 3
_OUTER_STATE = 2  # vectors that the hub and each worker keep: parameters and momentum

_TaskIds = tuple[TaskId, ...]


def plan(workload: Workload, machine: Machine, config: Local, window: Window) -> Plan:
    """Return the tasks of `window` rounds, in each of which all workers take as many inner steps.

    InvalidInput if there are fewer layers than fragments, the machine has too few devices or they
    are not linked with the hub, or it is not known how fast they are with the codec.
    """
    return _Rounds(workload, machine, config, balanced=False).plan(window.num_steps)


def plan_balanced(workload: Workload, machine: Machine, config: Local, window: Window) -> Plan:
    """Return the tasks of `window` rounds in which inner steps follow the workers' speeds.

    InvalidInput as by `plan`.
    """
    return _Rounds(workload, machine, config, balanced=True).plan(window.num_steps)


def step_traffic(num_workers: int) -> int:
    """Return the vectors that an outer step reads and writes, the sum of all workers' included."""
    return num_workers + 1 + _OUTER_TRAFFIC


def memory(workload: Workload, machine: Machine, config: Local) -> Mapping[str, int]:
    """Return the bytes that each device needs, a replica, and each host, by name.

    The hub, and each worker in the memory of its host, keep the group's parameters and momentum.
    """
    devices = machine.first_devices(config.workers)
    needed = dict.fromkeys((device.name for device in devices), replica_nbytes(workload))
    kept = _OUTER_STATE * FLOAT32_NBYTES * workload.num_parameters
    for name in (hub_of(machine, config).name, *(device.host for device in devices)):
        needed[name] = needed.get(name, 0) + kept
    return needed


def hub_of(machine: Machine, config: Local) -> Host:
    """Return the hub's host, by default that of the first device; InvalidInput if it is unknown."""
    if config.hub is None:
        return machine.host_of(machine.devices[0])
    for host in machine.hosts:
        if host.name == config.hub:
            return host
    known = ", ".join(host.name for host in machine.hosts)
    raise InvalidInput(
        "hub",
        f"{config.hub!r} is no host of machine {machine.name!r}",
        hint=f"choose one of {known}",
    )


def fragments_of(workload: Workload, config: Local) -> tuple[tuple[Layer, ...], ...]:
    """Return the layers of each fragment: layer i of those with parameters is in i mod P of P.

    InvalidInput if a fragment would have none.
    """
    layers = [layer for layer in workload.layers if layer.parameters]
    if len(layers) < config.fragments:
        raise InvalidInput(
            "fragments",
            f"{config.fragments} are more than the {len(layers)} layers of model {workload.name} "
            "that have parameters",
        )
    return tuple(tuple(layers[i :: config.fragments]) for i in range(config.fragments))


def exchange_nbytes(workload: Workload, config: Local) -> tuple[int, ...]:
    """Return the bytes of each fragment's outer gradient on the wire, from one worker.

    The largest is what has to pass at once: the more fragments, the less. InvalidInput as by
    `fragments_of`, and for a codec whose bytes depend on the values.
    """
    counts = map(_num_values, fragments_of(workload, config))
    if config.codec is None:
        return tuple(FLOAT32_NBYTES * count for count in counts)
    return tuple(map(wire_format(config.codec).nbytes, counts))


def inner_steps_of(
    machine: Machine,
    devices: Sequence[Device],
    config: Local,
    workload: Workload,
    balanced: bool,
) -> tuple[int, ...]:
    """Return the inner steps of each device's worker in a round, `sync_every` on average.

    They are equal or, if `balanced`, in proportion to the speeds of the machine's devices.
    """
    if not balanced:
        return (config.sync_every,) * len(devices)
    roofline = costs.Roofline.of(machine)
    lanes = [costs.compute_lane(device.name) for device in devices]
    steps = [inner_step(workload, roofline.rates[lane]) for lane in lanes]
    seconds = [
        _seconds(cost, roofline.rates[lane]) for cost, lane in zip(steps, lanes, strict=True)
    ]
    return inner_steps(config.sync_every, seconds)


def inner_step(workload: Workload, rate: costs.Rate) -> Cost:
    """Return the cost of a worker's inner step on a device of that rate: as long as all its parts.

    A cost knows no sequence of layers, some bound by arithmetic and others by memory traffic: its
    flops are those that take as long.
    """
    parts = _step_costs(workload)
    return Cost(
        flops=rate.flops_per_s * fsum(map(rate.work_s, parts)),
        nbytes=fsum(part.nbytes for part in parts),
        num_calls=sum(part.num_calls for part in parts),
    )


def _step_costs(workload: Workload) -> list[Cost]:
    """Return the costs of loading, all layers' forward and backward, and the update."""
    step = ComputeStep(workload, ())
    passes = [cost for layer in workload.layers for cost in (layer.forward, layer.backward)]
    return [step.load, workload.accumulated, *passes, step.update]


def _seconds(cost: Cost, rate: costs.Rate) -> float:
    return rate.work_s(cost) + rate.latency_s(cost)


def _num_values(layers: Sequence[Layer]) -> int:
    return sum(layer.num_parameters for layer in layers)


class Turn(NamedTuple):
    """The inner steps before a fragment is sent: `beside` the one before it, and then `alone`."""

    beside: int
    alone: int


def turns(config: Local, num_steps: int) -> tuple[Turn, ...]:
    """Return the turns of all fragments in a round of so many inner steps of a worker."""
    sent = [0, *(config.sent_after(fragment, num_steps) for fragment in range(config.fragments))]
    counts = [after - before for before, after in pairwise(sent)]
    besides = [min(config.delay_of(num_steps), count) for count in counts]
    return tuple(Turn(own, count - own) for own, count in zip(besides, counts, strict=True))


@dataclass(frozen=True)
class _Block:
    """The work of one worker for one fragment.

    `beside` are its inner steps while the fragment before travels, `alone` the others before this
    one is sent; None if there are none. `first` are they together: in the first round nothing
    travels. `out` is before it is sent, `up` ends with the hub, and `back` begins with the way from
    it.
    """

    on: tuple[Resource, ...]
    beside: Cost | None
    alone: Cost | None
    first: Cost | None
    out: tuple[Stage, ...]
    up: tuple[Stage, ...]
    back: tuple[Stage, ...]


class _Rounds:
    """The tasks of rounds, whose costs are made once: plans price a cost by its identity."""

    def __init__(
        self, workload: Workload, machine: Machine, config: Local, *, balanced: bool
    ) -> None:
        self.config, self.machine = config, machine
        self.hub, self.devices = hub_of(machine, config), machine.first_devices(config.workers)
        self.fragments = fragments_of(workload, config)
        self.nbytes = exchange_nbytes(workload, config)
        num_workers = Counter(device.host for device in self.devices)
        self.on_host = [num_workers[device.host] for device in self.devices]
        self.hub_steps = [self._hub_step(fragment) for fragment in range(config.fragments)]
        steps = inner_steps_of(machine, self.devices, config, workload, balanced)
        rates = costs.Roofline.of(machine).rates
        self.blocks = [
            self._blocks(workload, worker, num_steps, rates)
            for worker, num_steps in enumerate(steps)
        ]

    def plan(self, num_rounds: int) -> Plan:
        """Return the plan of so many rounds."""
        return Plan(self._tasks(num_rounds))

    def _tasks(self, num_rounds: int) -> Iterator[Task]:
        ready: list[_TaskIds] = [()] * len(self.devices)  # what the next inner steps wait for
        posted: list[_TaskIds] = [()] * len(self.devices)  # those beside a fragment that travels
        for number in range(num_rounds):
            for fragment in range(len(self.fragments)):
                arrived: _TaskIds = ()
                for worker in range(len(self.devices)):
                    waits = ready[worker], posted[worker]
                    posted[worker], own = yield from self._until_sent(
                        number, fragment, worker, *waits
                    )
                    arrived += own
                for worker, blocks in enumerate(self.blocks):
                    back = blocks[fragment].back
                    ready[worker] = yield from following(number, worker, back, arrived)
                # Nobody waits for the hub's own step, which takes the cores of workers beside it.
                yield from following(number, None, [self.hub_steps[fragment]], arrived)

    def _until_sent(
        self, number: int, fragment: int, worker: int, ready: _TaskIds, posted: _TaskIds
    ) -> Generator[Task, None, tuple[_TaskIds, _TaskIds]]:
        """Yield a worker's inner steps before a fragment is sent, and its way to the hub.

        Returns what it is sent after, and what has ended when it is there.
        """
        block = self.blocks[worker][fragment]
        travels = number > 0 or fragment > 0
        alone = block.alone if travels else block.first
        if travels and block.beside is not None:
            beside = TaskId(number, Kind.TRAIN, f"{fragment}.beside", worker)
            yield Task(beside, block.on, block.beside, posted)
            ready += (beside,)
        if alone is not None:
            trained = TaskId(number, Kind.TRAIN, str(fragment), worker)
            yield Task(trained, block.on, alone, ready)
            ready = (trained,)
        ready = yield from following(number, worker, block.out, ready)
        return ready, (yield from following(number, worker, block.up, ready))

    def _hub_step(self, fragment: int) -> Stage:
        """Return what the hub does with a fragment: the sum of all payloads, and the outer step."""
        values = FLOAT32_NBYTES * _num_values(self.fragments[fragment])
        traffic = step_traffic(len(self.devices)) * values
        on_hub = [device for device in self.devices if device.host == self.hub.name]
        lanes = (*costs.core_lanes(on_hub), *costs.lone_core(self.hub))
        on = (Resource(self.hub.name, Lane.REDUCE), *lanes)
        return Stage(Kind.REDUCE, str(fragment), on, Cost(nbytes=traffic, num_calls=1))

    def _blocks(
        self, workload: Workload, worker: int, num_steps: int, rates: Mapping[Resource, costs.Rate]
    ) -> list[_Block]:
        """Return a worker's work for each fragment, of so many inner steps in a round."""
        config, device = self.config, self.devices[worker]
        lane = costs.compute_lane(device.name)
        step = inner_step(workload, rates[lane])
        return [
            _Block(
                on=(lane,),
                beside=_times(step, turn.beside),
                alone=_times(step, turn.alone),
                first=_times(step, turn.beside + turn.alone),
                out=tuple(self._out(fragment, worker)),
                up=tuple(self._up(fragment, worker)),
                back=tuple(self._back(fragment, worker)),
            )
            for fragment, turn in enumerate(turns(config, num_steps))
        ]

    def _out(self, fragment: int, worker: int) -> Iterator[Stage]:
        """Yield what makes a fragment's outer gradient; a GPU's is made in its host's memory."""
        part, device = str(fragment), self.devices[worker]
        if device.kind == DeviceKind.GPU:
            lanes = lanes_of(self.machine.route(device, self.machine.host_of(device)))
            cost = self._copied(fragment)
            yield Stage(Kind.D2H, part, (Resource(device.name, Lane.D2H), *lanes), cost)
        made = self._in_memory(worker, fragment, _GRADIENT_TRAFFIC)
        yield Stage(Kind.REDUCE, f"{part}.gradient", *made)
        if self.config.codec is not None:
            yield self._coding(Kind.ENCODE, fragment, device, num_payloads=1)

    def _up(self, fragment: int, worker: int) -> Iterator[Stage]:
        """Yield a fragment's way to the hub, and what the hub does before it is handed on."""
        part, device = str(fragment), self.devices[worker]
        yield Ways(self.machine, self.hub).up(part, device, self.nbytes[fragment])
        on = (Resource(self.hub.name, Lane.REDUCE), *costs.lone_core(self.hub))
        traffic = _TAKEN_TRAFFIC + (0 if self.config.codec is None else _DECODED_TRAFFIC)
        nbytes = traffic * FLOAT32_NBYTES * _num_values(self.fragments[fragment])
        yield Stage(Kind.DECODE, f"{part}.hub", on, Cost(nbytes=nbytes, num_calls=1))

    def _back(self, fragment: int, worker: int) -> Iterator[Stage]:
        """Yield the way of the others' payloads from the hub, and the worker's outer step."""
        part, device, num_workers = str(fragment), self.devices[worker], len(self.devices)
        ways = Ways(self.machine, self.hub)
        yield ways.down(part, device, (num_workers - 1) * self.nbytes[fragment])
        if self.config.codec is not None:
            yield self._coding(Kind.DECODE, fragment, device, num_workers)
        else:
            yield Stage(Kind.DECODE, part, *self._in_memory(worker, fragment, num_workers + 1))
        stepped = self._in_memory(worker, fragment, _OUTER_TRAFFIC + _LOADED_TRAFFIC)
        yield Stage(Kind.STEP, part, *stepped)
        if device.kind == DeviceKind.GPU:
            lanes = lanes_of(self.machine.route(self.machine.host_of(device), device))
            cost = self._copied(fragment)
            yield Stage(Kind.H2D, part, (Resource(device.name, Lane.H2D), *lanes), cost)

    def _coding(self, kind: Kind, fragment: int, device: Device, num_payloads: int) -> Stage:
        """Return the encoding, or the decoding and adding, of so many payloads of a fragment."""
        assert self.config.codec is not None
        known = wire_format(self.config.codec)
        on_cores = device.kind == DeviceKind.CPU
        station: Station = device if on_cores else self.machine.host_of(device)
        codec_speed(station, known)  # or InvalidInput
        on = costs.codec_lanes(station, known.kernel, kind)
        if not on_cores:  # whose worker issues nothing meanwhile
            on = (costs.compute_lane(device.name), *on)
        count = _num_values(self.fragments[fragment])
        cost = Cost(flops=num_payloads * count, num_calls=num_payloads * len(pieces(count)))
        return Stage(kind, str(fragment), on, cost)

    def _in_memory(self, worker: int, fragment: int, num_vectors: int) -> Transfer:
        """Return work on a fragment that reads and writes so many vectors of its values.

        It is that of the worker's cores, or of a GPU's host, while the device computes nothing.
        """
        device = self.devices[worker]
        nbytes = num_vectors * FLOAT32_NBYTES * _num_values(self.fragments[fragment])
        if device.kind == DeviceKind.CPU:
            turns_taken = costs.lone_core(self.machine.host_of(device))
            # Elsewhere all workers of a host do this at once, and share its memory's bandwidth.
            shared = 1 if turns_taken else self.on_host[worker]
            on = (*costs.copy_lanes(device), *turns_taken)
            return Transfer(on, Cost(nbytes=shared * nbytes, num_calls=1))
        on = (costs.compute_lane(device.name), Resource(device.host, Lane.REDUCE))
        return Transfer(on, Cost(nbytes=nbytes, num_calls=1))

    def _copied(self, fragment: int) -> Cost:
        """Return the cost of copying a fragment's parameters to or from a GPU."""
        nbytes = sum(layer.gradient_nbytes for layer in self.fragments[fragment])
        return Cost(nbytes=nbytes, num_calls=1)


def _times(step: Cost, count: int) -> Cost | None:
    """Return the cost of so many inner steps, None for none."""
    if not count:
        return None
    return Cost(count * step.flops, count * step.nbytes, count * step.num_calls)
