"""Place hubs and bodies on a machine's devices, and find the routes of messages between them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Host, Machine, Station, codec_speed
from paceline.core.plan import Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.transfer import Transfer, handling, lanes_of, message_lanes, message_tasks
from paceline.core.wire_format import Purpose, pieces
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, MessageSize


class DevicePlacement(NamedTuple):
    """The root hub's device; and for each body worker its own, and that of the hub it works for.

    `lanes` are the workers that alternate on each device, in the order of their turns.
    """

    hub: Device
    bodies: tuple[Device, ...]
    heads: tuple[Device, ...]
    lanes: dict[Device, range]


def place(machine: Machine, config: Wheel) -> DevicePlacement:
    """Return the placement; InvalidInput if there is no such host, or too few devices.

    In a tree the devices beside the root's are taken in the machine's order: that of a child hub,
    those of its workers, that of the next child hub.
    """
    config.check_tree()
    wanted = machine.devices[0].host if config.hub is None else config.hub
    with_devices = {device.host for device in machine.devices}
    if wanted not in with_devices:
        raise InvalidInput(
            "hub",
            f"{wanted!r} is no host of machine {machine.name!r} that has a device",
            hint=f"choose one of {', '.join(sorted(with_devices))}",
        )
    hub = next(device for device in machine.devices if device.host == wanted)
    others = [device for device in machine.devices if device != hub]
    num_devices = max(config.workers_by_device)
    if num_devices > len(others):
        of_children = f" and {config.child_hubs} child hubs" if config.child_hubs else ""
        most = config.lanes * (len(others) - config.child_hubs)
        raise InvalidInput(
            "workers",
            f"{config.workers} in lanes of {config.lanes}{of_children} need {num_devices} devices "
            f"beside the hub's {hub.name}, but machine {machine.name!r} has {len(others)}",
            hint=f"at most {max(0, most)} workers fit",
        )
    numbered = [hub, *others]
    lanes = {numbered[number]: own for number, own in config.workers_by_device.items()}
    bodies = tuple(device for device, workers in lanes.items() for _ in workers)
    hubs = config.workers_by_hub.items()
    heads = tuple(numbered[number] for number, workers in hubs for _ in workers)
    return DevicePlacement(hub, bodies, heads, lanes)


class RouteStage(NamedTuple):
    """A part of a message's route, and what the cores of its hosts do meanwhile."""

    kind: Kind
    on: tuple[Resource, ...]
    cost: Cost
    handled: tuple[Transfer, ...] = ()


class Message(NamedTuple):
    """A message of a plan by the stages of its route, for a step and a worker."""

    way: Sequence[RouteStage]
    step: int
    part: str
    worker: int

    def tasks(self, after: tuple[TaskId, ...]) -> Iterator[Task]:
        """Yield the stages, which follow one another, the first after these."""
        for stage in self.way:
            own = self._stage(stage, after)
            yield from own
            after = tuple(task.id for task in own)

    @property
    def arrival(self) -> tuple[TaskId, ...]:
        """The tasks after which the receiver can use it."""
        return tuple(task.id for task in self._stage(self.way[-1], ()))

    @property
    def undecoded(self) -> "Message":
        """The message until it is there, and still encoded."""
        is_decoded = self.way[-1].kind is Kind.DECODE
        return self._replace(way=self.way[:-1]) if is_decoded else self

    def _stage(self, stage: RouteStage, after: tuple[TaskId, ...]) -> tuple[Task, ...]:
        own = TaskId(self.step, stage.kind, self.part, self.worker)
        return message_tasks(own, (Transfer(stage.on, stage.cost), *stage.handled), after)


def routes(
    machine: Machine,
    placement: DevicePlacement,
    worker: int,
    sent: dict[Purpose, MessageSize],
    server: Station,
) -> dict[Purpose, tuple[RouteStage, ...]]:
    """Return the stages of each message of a step, for one body worker.

        gpu  --d2h-->  host  --send-->  hub's host  --h2d-->  hub's gpu

    Encoded values are encoded before, and decoded after, by the devices that compute with them; the
    body's parameters and gradients by the `server`, which may be in the memory of the hub's host.
    """
    body, hub = placement.bodies[worker], placement.heads[worker]
    found = {}
    for purpose in (*TO_HUB, *FROM_HUB):
        there = server if purpose in (Purpose.PARAMETERS, Purpose.GRADIENTS) else hub
        source, target = (body, there) if purpose in TO_HUB else (there, body)
        lane = Resource(body.name, Lane.UPLOAD if purpose in TO_HUB else Lane.DOWNLOAD)
        whole = stages(machine, source, target, lane, sent[purpose])
        # Labels do not come from the GPU: the host has loaded them.
        known = purpose is Purpose.LABELS and whole[0].kind is Kind.D2H and len(whole) > 1
        found[purpose] = whole[1:] if known else whole
    return found


def stages(
    machine: Machine, source: Station, target: Station, lane: Resource, message: MessageSize
) -> tuple[RouteStage, ...]:
    """Return the stages of a message between two devices or hosts, on `lane` of one of them."""
    cost = Cost(nbytes=message.nbytes, num_calls=1)
    one, other = _host_of(machine, source), _host_of(machine, target)
    way = []
    if _is_gpu(source):
        lanes = lanes_of(machine.route(source, one))
        way.append(RouteStage(Kind.D2H, (Resource(source.name, Lane.D2H), *lanes), cost))
    # What is no core's own meets in its host's memory, unless it is known how processes there
    # exchange messages.
    in_memory = one == other and not all(map(_is_on_cores, (source, target)))
    if not in_memory or one.name in machine.network.within:
        route = machine.route(
            one if _is_gpu(source) else source, other if _is_gpu(target) else target
        )
        lanes = lanes_of(route)
        if any(hop.link.uses_cores for hop in route):
            lanes += tuple(costs.core_lanes([e for e in (source, target) if isinstance(e, Device)]))
        on = (*lanes, lane, *message_lanes(one, other))
        way.append(RouteStage(Kind.SEND, on, cost, handling(one, other, message.nbytes)))
    if _is_gpu(target):
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
        # Nothing where the times of a device's links contain its coding.
        ()
        if codec_speed(device, codec).is_within_links
        else (RouteStage(kind, costs.codec_lanes(device, codec.kernel, kind), coding),)
        for device, kind in ((source, Kind.ENCODE), (target, Kind.DECODE))
    )
    return (*encode, *way, *decode)


def server_of(machine: Machine, hub: Device, config: Wheel) -> Station:
    """Return the place where the server of a hub on that device keeps the parameters.

    Cores keep them in their host's memory anyway.
    """
    is_lent = config.server_memory == "host" and hub.kind == DeviceKind.GPU
    return machine.host_of(hub) if is_lent else hub


def updating_on(server: Station, computing: tuple[Resource, ...]) -> tuple[Resource, ...]:
    """Return what a hub that holds these computes on while it updates or sums the server's vectors.

    Its thread does nothing else meanwhile, so that the device waits.
    """
    if isinstance(server, Host):
        return (*computing, Resource(server.name, Lane.REDUCE))
    return computing


def _is_on_cores(station: Station) -> bool:
    return isinstance(station, Device) and station.kind == DeviceKind.CPU


def _host_of(machine: Machine, station: Station) -> Host:
    return machine.host_of(station) if isinstance(station, Device) else station


def _is_gpu(station: Station) -> bool:
    return isinstance(station, Device) and station.kind == DeviceKind.GPU
