"""The machine of a run, as a plan sees it: fitted to what the hub and the workers have measured."""

from collections.abc import Mapping

from paceline.core.cost import Measured, Roofline
from paceline.core.machine import CodecSpeed, Device, Host, Link, Machine
from paceline.core.plan import Kind
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.profile import Profile, memory_bytes
from paceline.training.this_machine import Speed

_SOURCE = "measured by the workers before this run"
_NO_TIME = 1e18  # bytes/s
_LEAST_S = 1e-9


def device_name(kind: str, number: int) -> str:
    """Return what plans call a device: the hub's is number 0, then those of the bodies."""
    return f"{kind}{number}"


def devices_of(config: Wheel) -> dict[int, list[int]]:
    """Return the workers that alternate on each body's device, by its number."""
    found: dict[int, list[int]] = {}
    for worker in range(config.workers):
        found.setdefault(1 + worker // config.lanes, []).append(worker)
    return found


def machine_of(
    workload: Workload, config: Wheel, hub: Profile, bodies: Mapping[int, Profile]
) -> tuple[Machine, Measured]:
    """Return the machine, and the prices of its plans.

    `bodies` are the profiles of the first worker of each device, by the device's number.
    """
    profiles = {0: hub} | {number: bodies[number] for number in devices_of(config)}
    there = dict.fromkeys(one.host for one in profiles.values())
    hosts = {host: f"host{number}" for number, host in enumerate(there)}
    devices = [_device(workload, number, one, hosts[one.host]) for number, one in profiles.items()]
    links: dict[tuple[str, str], Link] = {}
    for one in bodies.values():
        between = (hosts[hub.host], hosts[one.host])
        links.setdefault(between, _link(between, one.link_bytes_per_s, one.latency_s))
    for number, one in profiles.items():
        if one.copy_bytes_per_s is not None:
            ends = (hosts[one.host], device_name(one.kind, number))
            links[ends] = _link(ends, one.copy_bytes_per_s, 0.0)
    machine = Machine(
        name="this-run",
        hosts=tuple(_host(name) for name in hosts.values()),
        devices=tuple(devices),
        links=tuple(links.values()),
    )
    durations = {
        (device.name, kind, part): seconds
        for device, one in zip(devices, profiles.values(), strict=True)
        for kind, part, seconds in one.seconds
    }
    return machine, Measured(durations, Roofline.of(machine))


def _host(name: str) -> Host:
    return Host(
        name=name,
        cores=1,
        memory_bytes=memory_bytes(),
        memory_bandwidth_bytes_per_s=_NO_TIME,
        source=_SOURCE,
    )


def _device(workload: Workload, number: int, one: Profile, host: str) -> Device:
    computing = (Kind.FORWARD, Kind.BACKWARD)
    seconds = sum(seconds for kind, _, seconds in one.seconds if kind in computing)
    speed = Speed.of(workload, max(seconds, _LEAST_S))
    return Device(
        name=device_name(one.kind, number),
        host=host,
        kind=one.kind,
        flops_per_s=speed.flops_per_s,
        memory_bytes=memory_bytes(),
        memory_bandwidth_bytes_per_s=speed.nbytes_per_s,
        codecs={
            kernel: CodecSpeed(encode_values_per_s=encode, decode_values_per_s=decode)
            for kernel, (encode, decode) in one.codecs.items()
        },
        source=_SOURCE,
    )


def _link(between: tuple[str, str], bytes_per_s: float, latency_s: float) -> Link:
    return Link(
        between=between, bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s, source=_SOURCE
    )
