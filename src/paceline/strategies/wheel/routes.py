"""Place hubs and bodies on a machine's devices, and find the routes of messages between them."""

from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, DeviceKind, Machine, codec_speed
from paceline.core.plan import Cost, Kind, Lane, Resource
from paceline.core.transfer import lanes_of
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
            f"hub: {wanted!r} is no host of machine {machine.name!r} that has a device; "
            f"choose one of {', '.join(sorted(with_devices))}"
        )
    hub = next(device for device in machine.devices if device.host == wanted)
    others = [device for device in machine.devices if device != hub]
    num_devices = max(config.workers_by_device)
    if num_devices > len(others):
        of_children = f" and {config.child_hubs} child hubs" if config.child_hubs else ""
        most = config.lanes * (len(others) - config.child_hubs)
        raise InvalidInput(
            f"workers: {config.workers} in lanes of {config.lanes}{of_children} need {num_devices} "
            f"devices beside the hub's {hub.name}, but machine {machine.name!r} has {len(others)}; "
            f"at most {max(0, most)} workers fit"
        )
    numbered = [hub, *others]
    lanes = {numbered[number]: own for number, own in config.workers_by_device.items()}
    bodies = tuple(device for device, workers in lanes.items() for _ in workers)
    hubs = config.workers_by_hub.items()
    heads = tuple(numbered[number] for number, workers in hubs for _ in workers)
    return DevicePlacement(hub, bodies, heads, lanes)


class RouteStage(NamedTuple):
    """A part of a message's route."""

    kind: Kind
    on: tuple[Resource, ...]
    cost: Cost


def routes(
    machine: Machine, placement: DevicePlacement, worker: int, sent: dict[Purpose, MessageSize]
) -> dict[Purpose, tuple[RouteStage, ...]]:
    """Return the stages of each message of a step, for one body worker.

        gpu  --d2h-->  host  --send-->  hub's host  --h2d-->  hub's gpu

    Encoded values are encoded before, and decoded after, by the devices that compute with them.
    """
    body, hub = placement.bodies[worker], placement.heads[worker]
    found = {}
    for purpose in (*TO_HUB, *FROM_HUB):
        source, target = (body, hub) if purpose in TO_HUB else (hub, body)
        lane = Resource(body.name, Lane.UPLOAD if purpose in TO_HUB else Lane.DOWNLOAD)
        whole = stages(machine, source, target, lane, sent[purpose])
        # Labels do not come from the GPU: the host has loaded them.
        known = purpose is Purpose.LABELS and whole[0].kind is Kind.D2H and len(whole) > 1
        found[purpose] = whole[1:] if known else whole
    return found


def stages(
    machine: Machine, source: Device, target: Device, lane: Resource, message: MessageSize
) -> tuple[RouteStage, ...]:
    """Return the stages of a message between two devices, on `lane` of one of them."""
    cost = Cost(nbytes=message.nbytes, num_calls=1)
    one, other = machine.host_of(source), machine.host_of(target)
    way = []
    if source.kind == DeviceKind.GPU:
        lanes = lanes_of(machine.route(source, one))
        way.append(RouteStage(Kind.D2H, (Resource(source.name, Lane.D2H), *lanes), cost))
    # GPUs of one host meet in its memory, unless it is known how its processes exchange messages.
    in_memory = one == other and DeviceKind.GPU in (source.kind, target.kind)
    if not in_memory or one.name in machine.network.within:
        ends = (
            source if source.kind == DeviceKind.CPU else one,
            target if target.kind == DeviceKind.CPU else other,
        )
        route = machine.route(*ends)
        lanes = lanes_of(route)
        if any(hop.link.uses_cores for hop in route):
            cores = [device for device in (source, target) if device.kind == DeviceKind.CPU]
            lanes += tuple(costs.compute_lane(device.name) for device in cores)
        way.append(RouteStage(Kind.SEND, (*lanes, lane), cost))
    if target.kind == DeviceKind.GPU:
        lanes = lanes_of(machine.route(other, target))
        way.append(RouteStage(Kind.H2D, (Resource(target.name, Lane.H2D), *lanes), cost))
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
