"""Hosts, devices and links: the facts about hardware that a prediction needs."""

import heapq
import itertools
from collections.abc import Iterator
from math import inf
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.errors import InvalidInput
from paceline.core.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, ValuesPerSecond
from paceline.core.wire_format import Kernel, WireFormat

Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")]
Source = Annotated[str, Field(min_length=1, description="where the numbers come from")]


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CodecSpeed(_Fact):
    """Values a second of codecs with one kernel, by all cores of a device together.

    Decoding counts values that are added to others too, at what both reach on average. `latency_s`
    is paid for each piece that is encoded, and again when it is decoded: for buffers, and for
    threads that hand it on. Where both speeds are infinite, links were measured with the codec, and
    their times contain it.
    """

    encode_values_per_s: Annotated[ValuesPerSecond, Field(gt=0)]
    decode_values_per_s: Annotated[ValuesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)] = 0.0

    @property
    def is_within_links(self) -> bool:
        """Whether the times of links contain what encoding and decoding take."""
        return self.encode_values_per_s == self.decode_values_per_s == inf


class Host(_Fact):
    """A computer: its cores and its memory.

    `memory_bandwidth_bytes_per_s` is what copies and sums in memory reach, reads and writes both
    counted. `reduce_latency_s` is paid for each sum that the host makes of its ranks' gradients:
    from when the last of them is there, through all signals, until the ranks know of the result.
    `codecs` is how fast its cores are at what it has summed for GPUs.
    """

    name: Name
    cores: Annotated[int, Field(gt=0)]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    reduce_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    codecs: dict[Kernel, CodecSpeed] = {}
    source: Source

    def __hash__(self) -> int:
        return hash(self.name)


class Device(_Fact):
    """What one worker computes on: a GPU, or the cores of a host that it is pinned to.

    `flops_per_s` and `memory_bandwidth_bytes_per_s` are what layers reach, not what a data sheet
    promises; `call_latency_s` is paid once for each operation. `sync_latency_s` is what a GPU loses
    each time that backward has to tell its host how far it is, by default as much as for a call.
    `codecs` is how fast it encodes and decodes gradients, by the kernel that does it.
    """

    name: Name
    host: Name
    kind: Literal["cpu", "gpu"]
    flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    call_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    sync_latency_s: Annotated[Seconds, Field(ge=0)] | None = None
    codecs: dict[Kernel, CodecSpeed] = {}
    source: Source

    def __hash__(self) -> int:
        return hash(self.name)


class Link(_Fact):
    """A full-duplex connection: `bandwidth_bytes_per_s` in each direction.

    Between a host and itself it is what processes on that host exchange messages through. There the
    processors carry the bytes, so that `uses_cores` says whether the ranks' devices are busy
    meanwhile.
    """

    between: tuple[Name, Name]
    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)]
    uses_cores: bool = False
    source: Source

    @property
    def name(self) -> str:
        """The two ends, joined."""
        return "--".join(self.between)


class Hop(NamedTuple):
    """A link taken in one direction."""

    source: str
    target: str
    link: Link


class Machine(_Fact):
    """Everything that a plan may run on. The order of the devices is the order of the ranks."""

    name: Name
    hosts: tuple[Host, ...]
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        names = [host.name for host in self.hosts] + [device.name for device in self.devices]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"names must be unique, but {sorted(twice)} stand twice")
        hosts = {host.name for host in self.hosts}
        for device in self.devices:
            if device.host not in hosts:
                raise ValueError(
                    f"devices.{device.name}.host: no host {device.host!r}; known: {sorted(hosts)}"
                )
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise ValueError(
                        f"links.{link.name}.between: nothing is called {end!r}; "
                        f"known: {sorted(names)}"
                    )
        return self

    def first_devices(self, workers: int) -> tuple[Device, ...]:
        """Return the devices of so many workers; InvalidInput if there are fewer."""
        if len(self.devices) < workers:
            raise InvalidInput(
                f"workers: {workers} do not fit on machine {self.name!r}, "
                f"which has {len(self.devices)} devices"
            )
        return self.devices[:workers]

    def host_of(self, device: Device) -> Host:
        """Return the host that the device belongs to."""
        return next(host for host in self.hosts if host.name == device.host)

    def link_within(self, place: str) -> Link | None:
        """Return what processes on a host exchange messages through, if that is known."""
        return next((link for link in self.links if link.between == (place, place)), None)

    def route(self, source: Device | Host, target: Device | Host) -> tuple[Hop, ...]:
        """Return the way with the fewest hops, the wider one where two are equal.

        The cores of a host stand where their host stands; two of them use the host's link with
        itself. InvalidInput if there is no way.
        """
        start, goal = place_of(source), place_of(target)
        if start == goal:
            return (self._hop_within(start),)
        heap: list[tuple[int, float, int, str, tuple[Hop, ...]]] = [(0, 0.0, 0, start, ())]
        sequence = itertools.count(1)  # so that equally good ways keep the order of the links
        visited: set[str] = set()
        while heap:
            num_hops, seconds_per_byte, _, place, way = heapq.heappop(heap)
            if place == goal:
                return way
            if place in visited:
                continue
            visited.add(place)
            for hop in self._hops_from(place):
                slower = max(seconds_per_byte, 1 / hop.link.bandwidth_bytes_per_s)
                entry = (num_hops + 1, slower, next(sequence), hop.target, (*way, hop))
                heapq.heappush(heap, entry)
        raise InvalidInput(f"machine {self.name}: no link leads from {start!r} to {goal!r}")

    def _hop_within(self, place: str) -> Hop:
        link = self.link_within(place)
        if link is None:
            raise InvalidInput(
                f"machine {self.name}: two workers on {place!r} need a link between "
                f"[{place!r}, {place!r}], through which its processes exchange messages"
            )
        return Hop(place, place, link)

    def _hops_from(self, place: str) -> Iterator[Hop]:
        for link in self.links:
            one, other = link.between
            if place == one != other:
                yield Hop(one, other, link)
            elif place == other != one:
                yield Hop(other, one, link)


def place_of(station: Device | Host) -> str:
    """Return the name under which links know a host or a device."""
    if isinstance(station, Device) and station.kind == "cpu":
        return station.host
    return station.name


def codec_speed(station: Device | Host, wire_format: WireFormat) -> CodecSpeed:
    """Return how fast a device, or a host, is with a codec; InvalidInput if nobody says so."""
    kernel = wire_format.kernel
    if kernel not in station.codecs:
        what = "device" if isinstance(station, Device) else "host"
        raise InvalidInput(
            f"codec: {wire_format.name!r} cannot be planned, because nothing says how fast {what} "
            f"{station.name!r} is with kernel {kernel!r}: a machine file says it in "
            f"{what}s.codecs.{kernel}, by encode_values_per_s and decode_values_per_s"
        )
    return station.codecs[kernel]
