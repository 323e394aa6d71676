"""The ways of messages between a body worker's device and the hub's.

    gpu  --d2h-->  host  --send-->  hub's host  --h2d-->  hub's gpu

Encoded values are encoded before, and decoded after, by the devices that compute with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.cost import (
    codec_lanes,
    compute_lane,
    d2h_lane,
    download_lane,
    h2d_lane,
    upload_lane,
)
from paceline.core.machine import Device, Host, Machine, Station, codec_speed
from paceline.core.plan import Cost, Kind, Resource, Task, task_name
from paceline.core.transfer import lanes_of
from paceline.core.wire_format import WireFormat, pieces
from paceline.strategies.wheel.placement import Placement
from paceline.strategies.wheel.split import FROM_HUB, TO_HUB, Message, Purpose


class Leg(NamedTuple):
    """A part of a message's way."""

    kind: Kind
    on: tuple[Resource, ...]
    cost: Cost


@dataclass(frozen=True)
class Ways:
    """The legs of each message of a step, for one body worker."""

    worker: int
    legs: dict[Purpose, tuple[Leg, ...]]

    @classmethod
    def between(
        cls, machine: Machine, placement: Placement, worker: int, sent: dict[Purpose, Message]
    ) -> "Ways":
        """Return the ways of one worker.

        InvalidInput if no link leads to the hub, or it is not known how fast a device is with a
        codec.
        """
        body, hub = placement.bodies[worker], placement.hub
        legs = {}
        for purpose in (*TO_HUB, *FROM_HUB):
            source, target = (body, hub) if purpose in TO_HUB else (hub, body)
            lane = upload_lane(body.name) if purpose in TO_HUB else download_lane(body.name)
            whole = _legs(machine, source, target, lane, sent[purpose])
            # Labels do not come from the GPU: the host has loaded them.
            known = purpose is Purpose.LABELS and whole[0].kind is Kind.D2H and len(whole) > 1
            legs[purpose] = whole[1:] if known else whole
        return cls(worker, legs)

    def tasks(self, step: int, purpose: Purpose, after: tuple[str, ...]) -> Iterator[Task]:
        """Yield the parts of one message's way, which follow one another."""
        for kind, on, cost in self.legs[purpose]:
            name = task_name(step, kind, purpose, self.worker)
            yield Task(name, kind, on, cost, after, purpose.value)
            after = (name,)

    def arrival(self, step: int, purpose: Purpose) -> str:
        """Return the name of the task after which the receiver can use the message."""
        return task_name(step, self.legs[purpose][-1].kind, purpose, self.worker)

    def reception(self, step: int, purpose: Purpose) -> str:
        """Return the name of the task after which the receiver has the message, still encoded."""
        kinds = [leg.kind for leg in self.legs[purpose] if leg.kind is not Kind.DECODE]
        return task_name(step, kinds[-1], purpose, self.worker)


def _legs(
    machine: Machine, source: Device, target: Device, lane: Resource, message: Message
) -> tuple[Leg, ...]:
    cost = Cost(nbytes=message.nbytes, num_calls=1)
    one, other = machine.host_of(source), machine.host_of(target)
    legs = []
    if source.kind == "gpu":
        lanes = lanes_of(machine.route(source, one))
        legs.append(Leg(Kind.D2H, (d2h_lane(source.name), *lanes), cost))
    # GPUs of one host meet in its memory, unless it is known how its processes exchange messages.
    in_memory = one == other and "gpu" in (source.kind, target.kind)
    if not in_memory or machine.link_within(one.name) is not None:
        legs.append(Leg(Kind.SEND, (*_network(machine, source, target), lane), cost))
    if target.kind == "gpu":
        lanes = lanes_of(machine.route(other, target))
        legs.append(Leg(Kind.H2D, (h2d_lane(target.name), *lanes), cost))
    if message.wire_format is None:
        return tuple(legs)
    encode = _coding(source, Kind.ENCODE, message.num_values, message.wire_format)
    decode = _coding(target, Kind.DECODE, message.num_values, message.wire_format)
    return (*encode, *legs, *decode)


def _network(machine: Machine, source: Device, target: Device) -> tuple[Resource, ...]:
    one, other = machine.host_of(source), machine.host_of(target)
    route = machine.route(_in_host(source, one), _in_host(target, other))
    lanes = lanes_of(route)
    if any(hop.link.uses_cores for hop in route):
        cores = [device for device in (source, target) if device.kind == "cpu"]
        lanes += tuple(compute_lane(device.name) for device in cores)
    return lanes


def _in_host(device: Device, host: Host) -> Station:
    return device if device.kind == "cpu" else host


def _coding(device: Device, kind: Kind, count: int, known: WireFormat) -> tuple[Leg, ...]:
    """Return what a device encodes or decodes, or nothing where its links' times contain that."""
    if codec_speed(device, known).is_within_links:
        return ()
    cost = Cost(flops=count, num_calls=len(pieces(count)))
    return (Leg(kind, codec_lanes(device, known.kernel, kind), cost),)
