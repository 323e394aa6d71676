"""Measure a worker's device and its link to the hub, and make the plan's machine of all of them."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import FailFast, Field
from torch import nn

from paceline.core.cost import Measured, Rate, Roofline
from paceline.core.losses import Losses
from paceline.core.machine import CodecSpeed, Device, DeviceKind, Machine
from paceline.core.network import Link
from paceline.core.plan import Kind
from paceline.core.settings import Record
from paceline.core.strategy import Calibrated
from paceline.core.wire_format import Kernel, wire_format
from paceline.core.workload import Workload
from paceline.devices import device_of
from paceline.exchange.setup import TrainingSetup
from paceline.links.group import Group, boot_id
from paceline.measure import timing
from paceline.measure.cores import cores_here
from paceline.measure.devices import codec_speed, copy_speed
from paceline.measure.layers import profile
from paceline.measure.link import link_speed, message_speed
from paceline.measure.this_machine import Speed, host_here, memory_bytes
from paceline.rpc.reading import PerSecond, Seconds
from paceline.strategies.local.config import Local
from paceline.strategies.local.outer import OuterModel
from paceline.strategies.local.plan import FLOAT32_NBYTES, inner_step, step_traffic
from paceline.strategies.local.protocol import RunSpec
from paceline.strategies.local.trace import HUB

_SOURCE = "measured by the workers before this run"
_MIN_SECONDS = 1e-9
_MIN_PROBE_NBYTES = 64 * 1024
_MOST_PARTS = 100_000  # of an inner step, forward and backward
_MOST_STEPPED = 1 << 24  # values of an outer step that is measured
_NETWORK = Path("/proc/self/ns/net")
Ask = Callable[[int, int], None]


class DeviceProfile(Record):
    """The speed of a worker's device and of its link to the hub.

    `host` tells its network from others. `seconds` are those of each part of an inner step, by kind
    and layer; `codecs` are values a second encoded and decoded, by kernel. `memory_bytes_per_s` is
    what an outer step reads and writes in host memory, `unrest` that of `core.losses`. One of its
    `cores` sends or receives `core_bytes_per_s` of messages.
    """

    kind: DeviceKind
    host: Annotated[str, Field(max_length=200)]
    seconds: Annotated[
        tuple[tuple[Kind, str, Seconds], ...], FailFast(), Field(max_length=_MOST_PARTS)
    ]
    codecs: dict[Kernel, tuple[PerSecond, PerSecond]]
    copy_bytes_per_s: PerSecond | None = None
    memory_bytes_per_s: PerSecond
    unrest: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    latency_s: Seconds
    link_bytes_per_s: PerSecond
    core_bytes_per_s: PerSecond
    cores: Annotated[int, Field(ge=1, le=1 << 16)]

    @property
    def step_s(self) -> float:
        """The seconds of an inner step."""
        return sum(seconds for _, _, seconds in self.seconds)


def network_here() -> str:
    """Return the identity of this process's network: containers of one kernel have own ones."""
    return f"{boot_id()} {_NETWORK.readlink()}"


def device_profile(
    setup: TrainingSetup, spec: RunSpec, group: Group, ask: Ask, nbytes: int
) -> DeviceProfile:
    """Measure a device by inner steps, and its link, over which `ask` sends and gets bytes."""
    found = profile(
        *(setup.model, setup.workload, lambda: setup.source(0), setup.optimizer, setup.learning),
        *(group, spec.settings.profile_s, {}),
    )
    if setup.factor is not None:
        found = found.slowed({one.name: setup.factor for one in found.machine.devices})
    (device,) = found.machine.devices
    codecs = [] if spec.config.codec is None else [spec.config.codec]
    link = link_speed(ask, max(nbytes, _MIN_PROBE_NBYTES))
    is_gpu = device_of(group.device).is_asynchronous
    stepped = min(nbytes // FLOAT32_NBYTES // spec.config.fragments, _MOST_STEPPED)
    return DeviceProfile(
        kind=device.kind,
        host=network_here(),
        seconds=tuple((key.kind, key.part, one) for key, one in found.durations.items()),
        codecs={wire_format(name).kernel: codec_speed(name, stepped) for name in codecs},
        copy_bytes_per_s=copy_speed(group.device) if is_gpu else None,
        memory_bytes_per_s=_memory_speed(stepped),
        unrest=found.machine.usual_losses.unrest,
        latency_s=link.latency_s,
        link_bytes_per_s=link.bytes_per_s,
        core_bytes_per_s=link.core_bytes_per_s,
        cores=cores_here(),
    )


def _memory_speed(num_values: int) -> float:
    """Return the bytes a second of an outer step of two workers, as a plan counts them."""
    outer = OuterModel([(nn.Parameter(torch.ones(num_values)),)], Local(workers=2))
    terms = [(0.5, torch.ones(num_values)) for _ in range(2)]

    def step() -> None:
        outer.step(0, terms)
        outer.digest(0)

    seconds = max(timing.median_s(step), _MIN_SECONDS)
    return step_traffic(len(terms)) * FLOAT32_NBYTES * num_values / seconds


def calibrate(
    workload: Workload, config: Local, workers: Mapping[int, DeviceProfile]
) -> Calibrated | None:
    """Return the machine of a run and the prices of its plan; None if a worker has no profile.

    The hub's host is host0, which the workers of its network share.
    """
    if set(range(config.workers)) - workers.keys():
        return None
    profiles = [workers[i] for i in range(config.workers)]
    processes = Counter([network_here(), *(one.host for one in profiles)])  # the hub's is one
    hosts = {network: f"host{number}" for number, network in enumerate(processes)}
    cores = {one.host: one.cores for one in profiles} | {network_here(): cores_here()}
    slowest = min(one.memory_bytes_per_s for one in profiles)
    others = [one.core_bytes_per_s for one in profiles if one.host != network_here()]
    core_speed = min(others, default=None)
    links: dict[tuple[str, str], Link] = {}
    devices = []
    for worker, one in enumerate(profiles):
        host, device = hosts[one.host], _device(workload, worker, one, hosts[one.host])
        devices.append(device)
        ends = (HUB, host)
        links.setdefault(ends, _link(ends, one.link_bytes_per_s, one.latency_s))
        if one.copy_bytes_per_s is not None:
            links[host, device.name] = _link((host, device.name), one.copy_bytes_per_s, 0.0)
    machine = Machine(
        name="this-run",
        hosts=tuple(
            host_here(
                name,
                _SOURCE,
                slowest,
                cores=cores[network],
                message_bytes_per_s=core_speed and message_speed(core_speed, cores[network], count),
            )
            for (network, count), name in zip(processes.items(), hosts.values(), strict=True)
        ),
        devices=tuple(devices),
        links=tuple(links.values()),
        losses=Losses.none(_SOURCE, max(one.unrest for one in profiles)),
    )
    return Calibrated(machine, Measured({}, Roofline.of(machine)))


def _device(workload: Workload, worker: int, one: DeviceProfile, host: str) -> Device:
    """Return the device as a plan knows it, on which an inner step takes as long as measured."""
    computing = (Kind.FORWARD, Kind.BACKWARD)
    seconds = sum(seconds for kind, _, seconds in one.seconds if kind in computing)
    speed = Speed.of(workload, max(seconds, _MIN_SECONDS))
    rate = Rate(speed.flops_per_s, speed.nbytes_per_s)
    # Loading and updating are in it, too, at a speed of their own.
    faster = rate.work_s(inner_step(workload, rate)) / max(one.step_s, _MIN_SECONDS)
    return Device(
        name=f"{one.kind}{worker}",
        host=host,
        kind=one.kind,
        flops_per_s=faster * speed.flops_per_s,
        memory_bytes=memory_bytes(),
        memory_bandwidth_bytes_per_s=faster * speed.nbytes_per_s,
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
