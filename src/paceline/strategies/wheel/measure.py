"""Measure the devices of a run and their links to the hub, and make the plan's machine of them."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Annotated

import torch
from pydantic import FailFast, Field

from paceline.core.cost import Measured, Roofline
from paceline.core.losses import Losses
from paceline.core.machine import CodecSpeed, Device, DeviceKind, Host, Machine
from paceline.core.network import Link
from paceline.core.plan import Kind, PriceKey
from paceline.core.settings import Record
from paceline.core.strategy import Calibrated
from paceline.core.timeline import Span
from paceline.core.wire_format import Kernel, wire_format
from paceline.core.workload import Workload
from paceline.data.batch import Batch
from paceline.links.group import boot_id
from paceline.measure import timing
from paceline.measure.cores import cores_here, lost_here
from paceline.measure.devices import codec_speed, copy_speed
from paceline.measure.link import link_speed, message_speed
from paceline.measure.this_machine import Speed, host_here, memory_bytes
from paceline.measure.unrest import unrest_of_traced
from paceline.record.clock import clock_for
from paceline.record.recorder import LayerMarks
from paceline.rpc.reading import PerSecond, Seconds
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.job import (
    TrainingJob,
    Updating,
    activations_of,
    device_name,
    kind_of,
    layers_in,
    lent_head,
    model_and_halves,
)
from paceline.strategies.wheel.lent import COPIES
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.trace import HalfRecorder

_SOURCE = "measured by the workers before this run"
_NUM_WARM_UP, _MAX_ROUNDS = 2, 200
_MIN_SECONDS = 1e-9
_NETWORK = Path("/proc/self/ns/net")
_MOST_PARTS = 100_000  # of a step, forward and backward
_MOST_BELOW = 1000  # devices of a child hub


class DeviceProfile(Record):
    """The speed of a device and, for a body worker's, of its link to the hub.

    `host` tells its network from others, and it may use `cores` of it. `seconds` are those of each
    part of a step, by kind and layer, of which it was `running` on a core for a share: with fewer
    cores than devices it waits for one. `unrest` is that of `core.losses`. `codecs` are values a
    second encoded and decoded, by kernel. A GPU copies `copy_bytes_per_s` to its host.
    `lost_beside` is what computation loses beside messages to and from the hub, which the same
    cores send; one core sends or receives `core_bytes_per_s`. `below`: for a child hub, the
    profiles of its body devices.
    """

    kind: DeviceKind
    host: Annotated[str, Field(max_length=200)]
    seconds: Annotated[
        tuple[tuple[Kind, str, Seconds], ...], FailFast(), Field(max_length=_MOST_PARTS)
    ]
    codecs: dict[Kernel, tuple[PerSecond, PerSecond]]
    cores: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    running: Annotated[float, Field(ge=0, le=1)] = 1.0
    unrest: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    lost_beside: Annotated[float, Field(ge=0, lt=1)] = 0.0
    copy_bytes_per_s: PerSecond | None = None
    latency_s: Seconds = 0.0
    link_bytes_per_s: PerSecond | None = None
    core_bytes_per_s: PerSecond | None = None
    below: Annotated[tuple["DeviceProfile", ...], Field(max_length=_MOST_BELOW)] = ()


def profile_device(
    device: torch.device,
    config: Wheel,
    run_step: Callable[[int], None],
    spans: list[Span],
    seconds: float,
) -> DeviceProfile:
    """Return the profile of a device on which `run_step` takes a step and leaves its spans.

    It is called with numbers from 0 up for about `seconds`, three times at least.
    """
    for number in range(_NUM_WARM_UP):
        run_step(number)
    spans.clear()
    started_s, busy_s = time.monotonic(), time.thread_time()
    for number in range(_MAX_ROUNDS):
        if number >= timing.FEWEST_ROUNDS and time.monotonic() > started_s + seconds:
            break
        run_step(_NUM_WARM_UP + number)
    busy_s, elapsed_s = time.thread_time() - busy_s, time.monotonic() - started_s
    medians = timing.median_durations(spans, lambda span: (span.kind, span.part))
    codecs = set(config.codecs.values())  # measured on the CPU; a GPU's count as equally fast
    return DeviceProfile(
        kind=kind_of(device),
        host=f"{boot_id()} {_NETWORK.readlink()}",  # containers of one kernel have own networks
        seconds=tuple((*key, value) for key, value in medians.items()),
        codecs={wire_format(name).kernel: codec_speed(name) for name in codecs},
        cores=cores_here(),
        running=min(1.0, busy_s / max(elapsed_s, _MIN_SECONDS)),
        unrest=unrest_of_traced(spans),
        copy_bytes_per_s=None if device.type == "cpu" else copy_speed(device),
    )


def with_link(known: DeviceProfile, ask: Callable[[int, int], None], nbytes: int) -> DeviceProfile:
    """Return the profile with its link to the hub, over which `ask` sends and gets bytes."""
    link = link_speed(ask, nbytes)
    lost = lost_here(link.num_cores, 1) if known.kind is DeviceKind.CPU else 0.0
    found = {
        "latency_s": link.latency_s,
        "link_bytes_per_s": link.bytes_per_s,
        "core_bytes_per_s": link.core_bytes_per_s,
        "lost_beside": lost,
    }
    return known.model_copy(update=found)


def profile_head(job: TrainingJob, updating: Updating) -> DeviceProfile:
    """Return the hub's profile, of answers and updates, with a model of its own."""
    spec, device = job.spec, job.device
    model, halves = model_and_halves(spec, job.recipe, job.kept_on)
    optimizer = updating.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # so that each round computes the same
    server = ParameterServer(
        *(model, halves, optimizer),
        num_workers=1,
        staleness=None,
        learning=updating.learning,
        checks_values=spec.pace is None,
        lent=lent_head(replace(job, halves=halves)),
    )
    server.workers.add(0)
    clock = clock_for(device)
    marks = LayerMarks(layers_in(server.answering_model, halves.head_names), clock)
    recorder = HalfRecorder(0, "hub", marks, clock)
    server.watch = lambda worker, step, kind: recorder.work(step, kind, *COPIES.get(kind, ()))
    rows = [row % job.num_samples for row in range(ceil(spec.batch_size / spec.num_parts))]
    batch = Batch.of(job.recipe.samples.__getitems__(rows))
    targets = batch.to(device).targets
    with torch.no_grad():
        activations = activations_of(halves, batch.to(job.kept_on).inputs, updating.learning)
    activations = activations.to(device)
    gradients = torch.zeros_like(server.body_parameters()[1])

    def run_step(number: int) -> None:
        version = server.version
        server.answer(0, number, version, activations, targets, 1.0)
        server.update(0, number, version, gradients)

    return profile_device(device, spec.config, run_step, recorder.trace.spans, spec.profile_s)


def calibrate(
    workload: Workload,
    config: Wheel,
    hub: DeviceProfile,
    workers: Mapping[int, DeviceProfile],
    *,
    is_paced: bool,
) -> Calibrated | None:
    """Return the machine and its prices; None if a device's first worker has no profile.

    Layers that are paced leave the cores to messages, and to each other. In a tree the root's
    workers are child hubs, and `workers` have what these have told.
    """
    profiles, parents = {0: hub}, dict[int, DeviceProfile]()
    for i, (number, own) in enumerate(config.workers_by_hub.items()):
        told, bodies = hub, config.devices_of(own)
        if config.child_hubs:
            if i not in workers:
                return None
            told = profiles[number] = workers[i]
            parents[number] = hub
        found = told.below if config.child_hubs else [workers.get(one) for one in bodies.values()]
        for device, body in zip(bodies, found, strict=True):
            if body is None:
                return None
            profiles[device], parents[device] = body, told
    messages = _messages(profiles, parents)
    if is_paced:
        idle = {"cores": len(profiles), "lost_beside": 0.0}
        profiles = {number: one.model_copy(update=idle) for number, one in profiles.items()}
    known = dict.fromkeys(one.host for one in profiles.values())
    hosts = {host: f"host{number}" for number, host in enumerate(known)}
    on_host = {host: [one for one in profiles.values() if one.host == host] for host in hosts}
    links = _links(profiles, parents, hosts, config)
    devices = [_device(workload, number, one, hosts[one.host]) for number, one in profiles.items()]
    # On a lone core the plan has messages and computation take turns.
    sharing = [one for number, one in profiles.items() if number and one.cores > 1]
    beside = max((one.lost_beside for one in sharing), default=0.0)
    unrest = _unrest([profiles[number] for number in config.workers_by_device], on_host)
    losses = Losses(beside_exchange=beside, spread=0.0, unrest=unrest, source=_SOURCE)
    machine = Machine(
        name="this-run",
        hosts=tuple(_host(name, on_host[host], messages[host]) for host, name in hosts.items()),
        devices=tuple(devices),
        links=tuple(links),
        losses=losses,
    )
    durations = {
        PriceKey(device.name, kind, part): seconds * _undisturbed(one, on_host[one.host])
        for device, one in zip(devices, profiles.values(), strict=True)
        for kind, part, seconds in one.seconds
    }
    return Calibrated(machine, Measured(durations, Roofline.of(machine)))


def _host(name: str, profiles: Sequence[DeviceProfile], message_bytes_per_s: float | None) -> Host:
    """Return the host of these devices, with the most cores that any of them may use."""
    cores = max(one.cores for one in profiles)
    return host_here(name, _SOURCE, cores=cores, message_bytes_per_s=message_bytes_per_s)


def _messages(
    profiles: Mapping[int, DeviceProfile], parents: Mapping[int, DeviceProfile]
) -> dict[str, float | None]:
    """Return what messages to and from other hosts reach on each host's cores, all together.

    None if there are no such messages.
    """
    speeds = (
        one.core_bytes_per_s
        for number, one in profiles.items()
        if number in parents and one.host != parents[number].host
    )
    slowest = min((speed for speed in speeds if speed is not None), default=None)
    processes = Counter(one.host for one in profiles.values())
    cores = {one.host: one.cores for one in profiles.values()}
    return {
        host: slowest and message_speed(slowest, cores[host], count)
        for host, count in processes.items()
    }


def _links(
    profiles: Mapping[int, DeviceProfile],
    parents: Mapping[int, DeviceProfile],
    hosts: Mapping[str, str],
    config: Wheel,
) -> Iterable[Link]:
    """Return the links between hosts, and between GPUs and theirs."""
    links: dict[tuple[str, str], Link] = {}
    for number, parent in parents.items():
        one = profiles[number]
        between = (hosts[parent.host], hosts[one.host])
        assert one.link_bytes_per_s is not None  # the gate lets no others in
        link = _link(between, one.link_bytes_per_s, one.latency_s)
        known_link = links.setdefault(between, link)
        # A child hub probes while others measure: the fastest probe was disturbed least.
        if config.child_hubs and link.bandwidth_bytes_per_s > known_link.bandwidth_bytes_per_s:
            links[between] = link
    for number, one in profiles.items():
        if one.copy_bytes_per_s is not None:
            ends = (hosts[one.host], device_name(one.kind, number))
            links[ends] = _link(ends, one.copy_bytes_per_s, 0.0)
    return links.values()


def _undisturbed(one: DeviceProfile, on_host: Sequence[DeviceProfile]) -> float:
    """Return the share of a device's seconds that it would take with a core of its own.

    Where devices share cores, plans have them take turns; elsewhere what ran beside it counts.
    """
    return one.running if _shares_cores(one, on_host) else 1.0


def _unrest(
    bodies: Iterable[DeviceProfile], on_host: Mapping[str, Sequence[DeviceProfile]]
) -> float:
    """Return the unrest of the most restless body with a core of its own: others share theirs.

    A hub's is not looked at: its parts are so short that any pause is many of them.
    """
    alone = (one.unrest for one in bodies if not _shares_cores(one, on_host[one.host]))
    return max(alone, default=0.0)


def _shares_cores(one: DeviceProfile, on_host: Sequence[DeviceProfile]) -> bool:
    """Return True if a device is on cores of which there are fewer than such devices."""
    on_cores = [other for other in on_host if other.kind is DeviceKind.CPU]
    return one.kind is DeviceKind.CPU and len(on_cores) > max(other.cores for other in on_host)


def _device(workload: Workload, number: int, one: DeviceProfile, host: str) -> Device:
    computing = (Kind.FORWARD, Kind.BACKWARD)
    seconds = sum(seconds for kind, _, seconds in one.seconds if kind in computing)
    speed = Speed.of(workload, max(seconds, _MIN_SECONDS))
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
