"""Place hubs and workers on devices, and find the routes of messages in a plan."""

from collections.abc import Generator, Sequence
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Host, Machine, Station, codec_speed
from paceline.core.names import not_known
from paceline.core.plan import Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.transfer import Transfer, lanes_of
from paceline.core.wire_format import Purpose, pieces
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, MessageSize

TaskIds = tuple[TaskId, ...]


class DevicePlacement(NamedTuple):
    """The devices of hubs and workers.

    `hub`: the device of the root hub. `bodies`: the device of each worker. `heads`: the device of
    each worker's hub. `lanes`: the workers of each device, in the order in which they compute.
    """

    hub: Device
    bodies: tuple[Device, ...]
    heads: tuple[Device, ...]
    lanes: dict[Device, range]


def place(machine: Machine, config: Wheel) -> DevicePlacement:
    """Place the hubs and the workers on devices.

    In a tree, hubs and workers use the machine's devices in order, after the root's device: each
    child hub's device is followed by the devices of its workers. Raises InvalidInput for an unknown
    host or too few devices.
    """
    config.check_tree()
    wanted = machine.devices[0].host if config.hub is None else config.hub
    with_devices = {device.host for device in machine.devices}
    if wanted not in with_devices:
        also = f": a host that has a device in machine {machine.name!r}"
        raise not_known("hub", wanted, sorted(with_devices), also)
    hub = next(device for device in machine.devices if device.host == wanted)
    others = [device for device in machine.devices if device != hub]
    num_devices = max(config.workers_by_device)
    if num_devices > len(others):
        of_children = f" and child_hubs={config.child_hubs}" if config.child_hubs else ""
        most = max(0, config.lanes * (len(others) - config.child_hubs))
        problem = f"must be at most {most} with lanes={config.lanes}{of_children}"
        problem += f": {machine.name!r} has {len(others)} devices in addition to the hub's"
        raise InvalidInput("workers", problem, got=config.workers)
    numbered = [hub, *others]
    lanes = {numbered[number]: own for number, own in config.workers_by_device.items()}
    bodies = tuple(device for device, workers in lanes.items() for _ in workers)
    hubs = config.workers_by_hub.items()
    heads = tuple(numbered[number] for number, workers in hubs for _ in workers)
    return DevicePlacement(hub, bodies, heads, lanes)


class RouteStage(NamedTuple):
    """One stage of a message's route, such as a copy from a GPU to its host.

    `on`: what the stage occupies. `handled`: the work of CPU cores, which send and receive bytes.
    """

    kind: Kind
    on: tuple[Resource, ...]
    cost: Cost
    handled: tuple[Transfer, ...] = ()


class Message(NamedTuple):
    """A message of one step and one worker in a plan.

    `way`: the stages of its route. `part`: the name of the message in the ids of its tasks.
    """

    way: Sequence[RouteStage]
    step: int
    part: str
    worker: int

    def tasks(self, after: TaskIds) -> Generator[Task, None, TaskIds]:
        """Yield all stages' tasks, which follow the tasks `after`; return the last stage's ids."""
        for stage in self.way:
            own = self._stage(stage, after)
            yield from own
            after = tuple(task.id for task in own)
        return after

    def arrival(self, *, decoded: bool = True) -> TaskIds:
        """Return the ids of the tasks after which the receiver has the values.

        Without `decoded`, the values are still encoded.
        """
        stages = [stage for stage in self.way if decoded or stage.kind is not Kind.DECODE]
        return tuple(task.id for task in self._stage(stages[-1], ()))

    def _stage(self, stage: RouteStage, after: TaskIds) -> tuple[Task, ...]:
        own = TaskId(self.step, stage.kind, self.part, self.worker)
        tasks = [Task(own, stage.on, stage.cost, after)]
        for on, cost in stage.handled:
            handled = own._replace(part=f"{self.part} on {on[0].owner}")
            tasks.append(Task(handled, on, cost, after))
        return tuple(tasks)


def routes(
    machine: Machine,
    body: Device,
    hub: Device,
    server: Station,
    sent: dict[Purpose, MessageSize],
) -> dict[Purpose, tuple[RouteStage, ...]]:
    """Return the stages of each message of a worker's step, by purpose.

        gpu  --d2h-->  host  --send-->  hub's host  --h2d-->  hub's gpu

    The sender of a message encodes, and the receiver decodes. `server`: the hub's device or host,
    which sends the parameters of the body (first layers) and receives their gradients.
    """
    found = {}
    for purpose in (*TO_HUB, *FROM_HUB):
        there = server if purpose in (Purpose.PARAMETERS, Purpose.GRADIENTS) else hub
        source, target = (body, there) if purpose in TO_HUB else (there, body)
        lane = Resource(body.name, Lane.UPLOAD if purpose in TO_HUB else Lane.DOWNLOAD)
        whole = stages(machine, source, target, lane, sent[purpose])
        # The labels are in host memory already: they need no copy from the GPU.
        known = purpose is Purpose.LABELS and whole[0].kind is Kind.D2H and len(whole) > 1
        found[purpose] = whole[1:] if known else whole
    return found


def stages(
    machine: Machine, source: Station, target: Station, lane: Resource, message: MessageSize
) -> tuple[RouteStage, ...]:
    """Return the stages of a message from `source` to `target`.

    `lane`: the worker's upload or download direction, which the SEND stage occupies.
    """
    cost = Cost(nbytes=message.nbytes, num_calls=1)
    one, other = _host_of(machine, source), _host_of(machine, target)
    way = []
    from_gpu, to_gpu = (_kind(one) == DeviceKind.GPU for one in (source, target))
    if from_gpu:
        lanes = lanes_of(machine.route(source, one))
        way.append(RouteStage(Kind.D2H, (Resource(source.name, Lane.D2H), *lanes), cost))
    # Messages within a host are copies in memory, with two exceptions that use a link: messages
    # between two CPU devices, and hosts for which the machine defines a link between processes.
    in_memory = one == other and {_kind(source), _kind(target)} != {DeviceKind.CPU}
    if not in_memory or one.name in machine.network.within:
        route = machine.route(one if from_gpu else source, other if to_gpu else target)
        lanes = lanes_of(route)
        if any(hop.link.uses_cores for hop in route):
            lanes += tuple(costs.core_lanes([e for e in (source, target) if isinstance(e, Device)]))
        on, handled = (*lanes, lane), list[Transfer]()
        for host in dict.fromkeys((one, other)):  # the sender's cores work, then the receiver's
            cores = (costs.message_lane(host), *costs.lone_core(host))
            if one == other:
                on += cores
            elif host.message_bytes_per_s is not None:
                handled.append(Transfer(cores, Cost(nbytes=message.nbytes)))
        way.append(RouteStage(Kind.SEND, on, cost, tuple(handled)))
    if to_gpu:
        lanes = lanes_of(machine.route(other, target))
        way.append(RouteStage(Kind.H2D, (Resource(target.name, Lane.H2D), *lanes), cost))
    if not way:
        on = (Resource(one.name, Lane.REDUCE), lane)
        way.append(RouteStage(Kind.SEND, on, Cost(nbytes=2 * message.nbytes, num_calls=1)))
    codec = message.wire_format
    if codec is None:
        return tuple(way)
    coding = Cost(flops=message.num_values, num_calls=len(pieces(message.num_values)))
    encode, decode = (
        # Add no stage if the device's measured link speed already includes encoding and decoding.
        ()
        if codec_speed(device, codec).is_within_links
        else (RouteStage(kind, costs.codec_lanes(device, codec.kernel, kind), coding),)
        for device, kind in ((source, Kind.ENCODE), (target, Kind.DECODE))
    )
    return (*encode, *way, *decode)


def server_of(machine: Machine, hub: Device, config: Wheel) -> Station:
    """Return where a hub keeps the parameters: the hub's device, or the host of its GPU."""
    is_lent = config.server_memory == "host" and hub.kind == DeviceKind.GPU
    return machine.host_of(hub) if is_lent else hub


def updating_on(server: Station, computing: tuple[Resource, ...]) -> tuple[Resource, ...]:
    """Return the resources that a hub's updates and sums occupy.

    `computing`: the resources that computation on the hub's device occupies. A server in main
    memory also occupies the host's memory; the device is still occupied, because it must wait.
    """
    if isinstance(server, Host):
        return (*computing, Resource(server.name, Lane.REDUCE))
    return computing


def _host_of(machine: Machine, station: Station) -> Host:
    return machine.host_of(station) if isinstance(station, Device) else station


def _kind(station: Station) -> DeviceKind | None:
    return station.kind if isinstance(station, Device) else None
