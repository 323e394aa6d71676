"""Measure the devices of a run and their links to the hub, and make the plan's machine of them."""

import time
from collections.abc import Callable, Mapping
from math import ceil
from pathlib import Path

import torch
from pydantic import ValidationError

from paceline.core.cost import Measured, Roofline
from paceline.core.errors import InvalidInput
from paceline.core.losses import Losses
from paceline.core.machine import CodecSpeed, Device, DeviceKind, Link, Machine
from paceline.core.plan import Kind, PriceKey
from paceline.core.settings import Record
from paceline.core.strategy import Calibrated
from paceline.core.timeline import Span
from paceline.core.wire_format import Kernel, wire_format
from paceline.core.workload import Workload
from paceline.data.batch import Batch
from paceline.links.group import boot_id
from paceline.measure import timing
from paceline.measure.devices import codec_speed, copy_speed
from paceline.measure.this_machine import Speed, host_here, memory_bytes
from paceline.record.clock import clock_for
from paceline.record.recorder import LayerMarks
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.job import (
    TrainingJob,
    Updating,
    activations_of,
    device_name,
    kind_of,
    layers_in,
    model_and_halves,
)
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.trace import HalfRecorder

_SOURCE = "measured by the workers before this run"
_NUM_WARM_UP, _MAX_ROUNDS = 2, 200
_NUM_PINGS = 20
_MIN_SECONDS = 1e-9
_NETWORK = Path("/proc/self/ns/net")


class DeviceProfile(Record):
    """The speed of a device and, for a body worker's, of its link to the hub.

    `host` tells its network from others. `seconds` are those of each part of a step, by kind and
    layer; `codecs` are values a second encoded and decoded, by kernel. A GPU copies
    `copy_bytes_per_s` to its host.
    """

    kind: DeviceKind
    host: str
    seconds: tuple[tuple[Kind, str, float], ...]
    codecs: dict[Kernel, tuple[float, float]]
    copy_bytes_per_s: float | None = None
    latency_s: float = 0.0
    link_bytes_per_s: float = 0.0

    @classmethod
    def from_json(cls, data: bytes) -> "DeviceProfile":
        """Return the profile in a message; InvalidInput if there is none."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise InvalidInput(f"a profile with {error.error_count()} faults") from None


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
    until_s = time.monotonic() + seconds
    for number in range(_MAX_ROUNDS):
        if number >= timing.FEWEST_ROUNDS and time.monotonic() > until_s:
            break
        run_step(_NUM_WARM_UP + number)
    medians = timing.median_durations(spans, lambda span: (span.kind, span.part))
    codecs = set(config.codecs.values())  # measured on the CPU; a GPU's count as equally fast
    return DeviceProfile(
        kind=kind_of(device),
        host=f"{boot_id()} {_NETWORK.readlink()}",  # containers of one kernel have own networks
        seconds=tuple((*key, value) for key, value in medians.items()),
        codecs={wire_format(name).kernel: codec_speed(name) for name in codecs},
        copy_bytes_per_s=None if device.type == "cpu" else copy_speed(device),
    )


def with_link(known: DeviceProfile, ask: Callable[[int, int], None], nbytes: int) -> DeviceProfile:
    """Return the profile with its link to the hub, over which `ask` sends and gets bytes."""
    small_s = min(timing.median_s(lambda: ask(1, 1), num_rounds=1) for _ in range(_NUM_PINGS))
    large_s = timing.median_s(lambda: ask(nbytes, nbytes))
    speed = 2 * nbytes / max(large_s - small_s, _MIN_SECONDS)
    return known.model_copy(update={"latency_s": small_s / 2, "link_bytes_per_s": speed})


def profile_head(job: TrainingJob, updating: Updating) -> DeviceProfile:
    """Return the hub's profile, of answers and updates, with a model of its own."""
    spec, device = job.spec, job.device
    model, halves = model_and_halves(spec, job.recipe, device)
    optimizer = updating.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # so that each round computes the same
    server = ParameterServer(
        *(model, halves, optimizer),
        num_workers=1,
        staleness=None,
        learning=updating.learning,
        checks_values=spec.pace is None,
    )
    server.workers.add(0)
    clock = clock_for(device)
    marks = LayerMarks(layers_in(model, halves.head_names), clock)
    recorder = HalfRecorder(0, "hub", marks, clock)
    server.watch = lambda worker, step, kind: recorder.work(step, kind)
    rows = [row % job.num_samples for row in range(ceil(spec.batch_size / spec.num_parts))]
    inputs, targets = Batch.of(job.recipe.samples.__getitems__(rows)).to(device)
    with torch.no_grad():
        activations = activations_of(halves, inputs, updating.learning)
    gradients = torch.zeros_like(server.body_parameters()[1])

    def run_step(number: int) -> None:
        version = server.version
        server.answer(0, number, version, activations, targets, 1.0)
        server.update(0, number, version, gradients)

    return profile_device(device, spec.config, run_step, recorder.trace.spans, spec.profile_s)


def calibrate(
    workload: Workload, config: Wheel, hub: DeviceProfile, workers: Mapping[int, DeviceProfile]
) -> Calibrated | None:
    """Return the machine and its prices; None if a device's first worker has no profile."""
    firsts = {number: own[0] for number, own in config.workers_by_device.items()}
    if any(worker not in workers for worker in firsts.values()):
        return None
    profiles = {0: hub} | {number: workers[worker] for number, worker in firsts.items()}
    known = dict.fromkeys(one.host for one in profiles.values())
    hosts = {host: f"host{number}" for number, host in enumerate(known)}
    links: dict[tuple[str, str], Link] = {}
    for number, one in profiles.items():
        if number:
            between = (hosts[hub.host], hosts[one.host])
            links.setdefault(between, _link(between, one.link_bytes_per_s, one.latency_s))
    for number, one in profiles.items():
        if one.copy_bytes_per_s is not None:
            ends = (hosts[one.host], device_name(one.kind, number))
            links[ends] = _link(ends, one.copy_bytes_per_s, 0.0)
    devices = [_device(workload, number, one, hosts[one.host]) for number, one in profiles.items()]
    machine = Machine(
        name="this-run",
        hosts=tuple(host_here(name, _SOURCE, cores=1) for name in hosts.values()),
        devices=tuple(devices),
        links=tuple(links.values()),
        losses=Losses.none(_SOURCE),
    )
    durations = {
        PriceKey(device.name, kind, part): seconds
        for device, one in zip(devices, profiles.values(), strict=True)
        for kind, part, seconds in one.seconds
    }
    return Calibrated(machine, Measured(durations, Roofline.of(machine)))


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
