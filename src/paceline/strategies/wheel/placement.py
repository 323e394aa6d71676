"""Who works on which device: the hub's head workers on one, `lanes` body workers on each other."""

import math
from dataclasses import dataclass

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Host, Machine
from paceline.strategies.wheel.config import Wheel


@dataclass(frozen=True)
class Placement:
    """The hub's host and device, and the device of each body worker."""

    host: Host
    hub: Device
    bodies: tuple[Device, ...]

    @property
    def lanes(self) -> dict[Device, list[int]]:
        """The workers that alternate on each device, in the order of their turns."""
        lanes: dict[Device, list[int]] = {}
        for worker, device in enumerate(self.bodies):
            lanes.setdefault(device, []).append(worker)
        return lanes


def place(machine: Machine, config: Wheel) -> Placement:
    """Return the placement; InvalidInput if there is no such host, or too few devices."""
    host = _hub_of(machine, config.hub)
    hub = next(device for device in machine.devices if device.host == host.name)
    others = [device for device in machine.devices if device != hub]
    num_devices = math.ceil(config.workers / config.lanes)
    if num_devices > len(others):
        raise InvalidInput(
            f"workers: {config.workers} in lanes of {config.lanes} need {num_devices} devices "
            f"beside the hub's {hub.name}, but machine {machine.name!r} has {len(others)}; "
            f"at most {config.lanes * len(others)} workers fit"
        )
    bodies = tuple(others[worker // config.lanes] for worker in range(config.workers))
    return Placement(host, hub, bodies)


def _hub_of(machine: Machine, name: str | None) -> Host:
    wanted = machine.devices[0].host if name is None else name
    with_devices = {device.host for device in machine.devices}
    for host in machine.hosts:
        if host.name == wanted and wanted in with_devices:
            return host
    raise InvalidInput(
        f"hub: {name!r} is no host of machine {machine.name!r} that has a device; "
        f"choose one of {', '.join(sorted(with_devices))}"
    )


def head_devices_needed(head_s: float, num_body_devices: int, step_s: float) -> int:
    """Return how many devices the head workers need, so that no body waits (section 3.4.1).

    One answer takes `head_s` (p), and each of k body devices, which needs `step_s` (t) for a step,
    asks once in that time: p k / t. ValueError if a time is not positive.
    """
    if head_s <= 0 or step_s <= 0:
        raise ValueError(f"an answer of {head_s} s and a step of {step_s} s must be positive")
    return math.ceil(head_s * num_body_devices / step_s)
