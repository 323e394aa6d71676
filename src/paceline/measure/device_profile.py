"""Profile the devices of an asynchronous run and their links to hubs (parameter servers)."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch
from pydantic import FailFast, Field

from paceline.core.cost import ProfiledCost, Roofline
from paceline.core.losses import Losses
from paceline.core.machine import CodecSpeed, Device, DeviceKind, Host, Machine
from paceline.core.network import Link
from paceline.core.plan import Kind, PriceKey
from paceline.core.settings import Record
from paceline.core.strategy import PricedMachine
from paceline.core.timeline import Span
from paceline.core.wire_format import Kernel, wire_format
from paceline.core.workload import Workload
from paceline.links.devices import device_of
from paceline.links.group import boot_id
from paceline.measure import timing
from paceline.measure.devices import codec_speed, copy_speed
from paceline.measure.this_machine import device_here, host_here, speed_of
from paceline.measure.timing import MIN_SECONDS, CoreTime, lost_beside

# Upper limit of times: a century.
Seconds = Annotated[float, Field(ge=0, le=3.2e9, allow_inf_nan=False)]
PerSecond = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
_NUM_WARM_UP, _MAX_ROUNDS, _NUM_PINGS = 2, 200, 20
_NETWORK = Path("/proc/self/ns/net")
_MOST_PARTS = 100_000  # maximum number of entries in a profile's `seconds`
_MOST_BELOW = 1000  # maximum number of workers' profiles inside a hub's profile
_SOURCE = "measured by the workers before this run"
# Number of a process's threads for messages: a thread of ZeroMQ, which encrypts, and a thread that
# checks and copies.
_MESSAGE_THREADS = 2


class HubLink(Record):
    """Latency and bytes per second of messages between a worker and its hub (parameter server).

    `core_bytes_per_s`: bytes per second that one core of the worker sends or receives.
    `lost_beside`: share of speed that computation loses while messages use the same cores.
    """

    latency_s: Seconds
    bytes_per_s: PerSecond
    core_bytes_per_s: PerSecond
    lost_beside: Annotated[float, Field(ge=0, lt=1)] = 0.0


class DeviceProfile(Record):
    """The speed of a device and, for a worker, of its link to the hub.

    `host`: identity of the host and its network namespace. `seconds`: kind, layer and duration of
    each part of a step. `codecs`: values per second that the device encodes and decodes, by kernel
    (code that several codecs share). `running`: share of the step time in which the device had a
    core; below 1 if there are more devices than cores. `unrest`: relative spread of the step times
    (`unrest_between`). `copy_bytes_per_s`: speed of copies from a GPU to its host. `below`: in the
    profile of a hub that is itself a worker, the profiles of the hub's workers.
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
    copy_bytes_per_s: PerSecond | None = None
    link: HubLink | None = None
    below: Annotated[tuple["DeviceProfile", ...], FailFast(), Field(max_length=_MOST_BELOW)] = ()

    def with_link(self, ask: Callable[[int, int], None], nbytes: int) -> "DeviceProfile":
        """Measure the link with messages of up to `nbytes`; return the profile with the link.

        `ask(n, m)` sends n bytes to the hub and receives m bytes.
        """
        small_s = min(timing.median_s(lambda: ask(1, 1), num_rounds=1) for _ in range(_NUM_PINGS))
        large = CoreTime(lambda: ask(nbytes, nbytes))
        large_s = timing.median_s(large)
        link = HubLink(
            latency_s=small_s / 2,
            bytes_per_s=2 * nbytes / max(large_s - small_s, MIN_SECONDS),
            core_bytes_per_s=2 * nbytes / max(large.busy_s, MIN_SECONDS),
            lost_beside=lost_beside(large.num_cores, 1) if self.kind is DeviceKind.CPU else 0.0,
        )
        return self.model_copy(update={"link": link})


def profile_device(
    device: torch.device,
    codecs: Iterable[str],
    run_step: Callable[[int], None],
    spans: list[Span],
    seconds: float,
) -> DeviceProfile:
    """Profile a device by running steps for about `seconds`, at least three steps.

    `run_step(number)` runs a step on the device and appends its spans to `spans`.
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
    return DeviceProfile(
        kind=device_of(device).kind,
        # a container with its own network counts as a host
        host=f"{boot_id()} {_NETWORK.readlink()}",
        seconds=tuple((*key, value) for key, value in medians.items()),
        # Measured on the CPU; codecs on a GPU are assumed to be equally fast.
        codecs={wire_format(name).kernel: codec_speed(name) for name in set(codecs)},
        cores=len(os.sched_getaffinity(0)),
        running=min(1.0, busy_s / max(elapsed_s, MIN_SECONDS)),
        unrest=timing.unrest_of_traced(spans),
        copy_bytes_per_s=None if device.type == "cpu" else copy_speed(device),
    )


def device_name(kind: str, number: int) -> str:
    """Return a device's name in plans, such as "gpu1"; the hub's device has number 0."""
    return f"{kind}{number}"


def message_speed(core_bytes_per_s: float, num_cores: int, num_processes: int) -> float:
    """Return the bytes per second of all messages of a host's hubs and workers.

    `num_processes`: number of these hubs and workers.
    """
    return core_bytes_per_s * min(num_cores, _MESSAGE_THREADS * num_processes)


@dataclass(frozen=True)
class ProfiledDevices:
    """The profiles of an asynchronous run's devices, and its tree of hubs.

    `profiles`: profile of each device, by the device's number in the plan. `hub_of`: number of each
    device's hub, without an entry for the root hub. `computing`: numbers of the devices that train.
    `is_paced`: whether layers sleep instead of computing, and so use no cores.
    """

    profiles: Mapping[int, DeviceProfile]
    hub_of: Mapping[int, int]
    computing: Sequence[int]
    is_paced: bool

    @cached_property
    def _hosts(self) -> dict[str, str]:
        """The plan's name of each host, by the host's identity."""
        known = dict.fromkeys(one.host for one in self.profiles.values())
        return {host: f"host{number}" for number, host in enumerate(known)}

    @cached_property
    def _shown(self) -> dict[int, DeviceProfile]:
        """The profiles to plan with; if layers are paced, without links and with enough cores."""
        if not self.is_paced:
            return dict(self.profiles)
        idle = {"cores": len(self.profiles), "link": None}
        return {number: one.model_copy(update=idle) for number, one in self.profiles.items()}

    def calibrated(self, workload: Workload) -> PricedMachine:
        """Return the machine, and the seconds that each device takes for each part of a step."""
        shown = self._shown
        # Skip single-core hosts: there, messages and computation already take turns in the plan.
        sharing = [one for number, one in shown.items() if number and one.cores > 1]
        lost = max((one.link.lost_beside for one in sharing if one.link), default=0.0)
        # Exclude hubs: their tasks are so short that the spread of their times says little.
        workers = (shown[number] for number in self.computing)
        unrest = max((one.unrest for one in workers if not self._shares_cores(one)), default=0.0)
        names = {number: device_name(one.kind, number) for number, one in shown.items()}
        machine = Machine(
            name="this-run",
            hosts=tuple(self._host(host) for host in self._hosts),
            devices=tuple(
                _device(workload, names[number], one, self._hosts[one.host])
                for number, one in shown.items()
            ),
            links=tuple(self._links(names)),
            losses=Losses(beside_exchange=lost, spread=0.0, unrest=unrest, source=_SOURCE),
        )
        # Subtract waits for a core: in the plan, devices that share a core already take turns.
        durations = {
            PriceKey(names[number], kind, part): seconds
            * (one.running if self._shares_cores(one) else 1.0)
            for number, one in shown.items()
            for kind, part, seconds in one.seconds
        }
        return PricedMachine(machine, ProfiledCost(durations, Roofline.of(machine)))

    def _host(self, host: str) -> Host:
        """Return the host with identity `host`, and the cores available to its devices.

        The host's `message_bytes_per_s` is None if no messages are sent between hosts.
        """
        below = ((self.profiles[number], self.profiles[hub]) for number, hub in self.hub_of.items())
        speeds = (
            one.link.core_bytes_per_s for one, hub in below if one.link and one.host != hub.host
        )
        slowest = min(speeds, default=None)
        count = Counter(one.host for one in self.profiles.values())[host]
        cores = [one.cores for one in self.profiles.values() if one.host == host][-1]
        return host_here(
            self._hosts[host],
            _SOURCE,
            cores=max(one.cores for one in self._shown.values() if one.host == host),
            message_bytes_per_s=slowest and message_speed(slowest, cores, count),
        )

    def _links(self, names: Mapping[int, str]) -> Iterable[Link]:
        """Return the links between hosts, and between GPUs and their hosts.

        If several devices have measured a link, one result counts. In a tree of hubs this is the
        fastest, because hubs measure while other devices are busy. With a single hub it is the
        first, because workers measure one after another.
        """
        links: dict[tuple[str, str], Link] = {}
        is_tree = any(self.hub_of.values())
        for number, hub in self.hub_of.items():
            one = self.profiles[number]
            between = (self._hosts[self.profiles[hub].host], self._hosts[one.host])
            assert one.link is not None  # a hub refuses workers' profiles without a link
            link = _link(between, one.link.bytes_per_s, one.link.latency_s)
            known = links.setdefault(between, link)
            if is_tree and link.bandwidth_bytes_per_s > known.bandwidth_bytes_per_s:
                links[between] = link
        for number, one in self.profiles.items():
            if one.copy_bytes_per_s is not None:
                ends = (self._hosts[one.host], names[number])
                links[ends] = _link(ends, one.copy_bytes_per_s, 0.0)
        return links.values()

    def _shares_cores(self, one: DeviceProfile) -> bool:
        """Return True for a CPU device whose host has fewer cores than CPU devices."""
        there = [other for other in self._shown.values() if other.host == one.host]
        num_on_cores = sum(other.kind is DeviceKind.CPU for other in there)
        return one.kind is DeviceKind.CPU and num_on_cores > max(other.cores for other in there)


def _device(workload: Workload, name: str, one: DeviceProfile, host: str) -> Device:
    computing = (Kind.FORWARD, Kind.BACKWARD)
    seconds = sum(seconds for kind, _, seconds in one.seconds if kind in computing)
    speed = speed_of(workload, max(seconds, MIN_SECONDS))
    codecs = {
        kernel: CodecSpeed(encode_values_per_s=encode, decode_values_per_s=decode)
        for kernel, (encode, decode) in one.codecs.items()
    }
    return device_here(name, host, one.kind, speed, _SOURCE, codecs=codecs)


def _link(between: tuple[str, str], bytes_per_s: float, latency_s: float) -> Link:
    return Link(
        between=between, bandwidth_bytes_per_s=bytes_per_s, latency_s=latency_s, source=_SOURCE
    )
