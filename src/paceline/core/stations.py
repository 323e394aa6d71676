"""Hosts, devices and switches: what links join."""

from math import inf
from typing import Annotated, Literal

from pydantic import Field

from paceline.core.errors import InvalidInput
from paceline.core.facts import Fact, Name, Source
from paceline.core.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds, ValuesPerSecond
from paceline.core.wire_format import Kernel, WireFormat


class CodecSpeed(Fact):
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


class Host(Fact):
    """A computer: its cores and its memory.

    `memory_bandwidth_bytes_per_s` is what copies and sums in memory reach, reads and writes both
    counted. `reduce_latency_s` is paid for each sum that the host makes of its ranks' gradients:
    from when the last of them is there, through all signals, until the ranks know of the result.
    `codecs` is how fast its cores are at what it has summed for GPUs.
    """

    name: Annotated[Name, Field(examples=["host0"])]
    cores: Annotated[int, Field(gt=0, examples=[16])]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    reduce_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    codecs: dict[Kernel, CodecSpeed] = Field(default_factory=dict)
    source: Source

    def __hash__(self) -> int:
        return hash(self.name)


class Device(Fact):
    """What one worker computes on: a GPU, or the cores of a host that it is pinned to.

    `flops_per_s` and `memory_bandwidth_bytes_per_s` are what layers reach, not what a data sheet
    promises; `call_latency_s` is paid once for each operation. `sync_latency_s` is what a GPU loses
    each time that backward has to tell its host how far it is, by default as much as for a call.
    `codecs` is how fast it encodes and decodes gradients, by the kernel that does it.
    """

    name: Name
    host: Annotated[Name, Field(examples=["host0"])]
    kind: Annotated[Literal["cpu", "gpu"], Field(examples=["gpu"])]
    flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    call_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    sync_latency_s: Annotated[Seconds, Field(ge=0)] | None = None
    codecs: dict[Kernel, CodecSpeed] = Field(default_factory=dict)
    source: Source

    def __hash__(self) -> int:
        return hash(self.name)


class Switch(Fact):
    """Where links meet, and nothing is computed."""

    name: Name
    source: Source


Station = Device | Host


def place_of(station: Station) -> str:
    """Return the name under which links know a host or a device."""
    if isinstance(station, Device) and station.kind == "cpu":
        return station.host
    return station.name


def codec_speed(station: Station, wire_format: WireFormat) -> CodecSpeed:
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
