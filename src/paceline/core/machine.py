"""Hosts, devices and links: the facts about hardware that a prediction needs."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from paceline.core.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

Name = Annotated[str, Field(min_length=1, pattern=r"^[A-Za-z0-9_.-]+$")]
Source = Annotated[str, Field(min_length=1, description="where the numbers come from")]


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Host(_Fact):
    """A computer: its cores and its memory."""

    name: Name
    cores: Annotated[int, Field(gt=0)]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    source: Source


class Device(_Fact):
    """What one worker computes on: a GPU, or the cores of a host that it is pinned to.

    `flops_per_s` and `memory_bandwidth_bytes_per_s` are what layers reach, not what a data sheet
    promises; `call_latency_s` is paid once for each operation.
    """

    name: Name
    host: Name
    kind: Literal["cpu", "gpu"]
    flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    call_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    source: Source


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

    def route(self, source: Device, target: Device) -> tuple[Hop, ...]:
        """Return the way with the fewest hops, the wider one where two are equal.

        The cores of a host stand where their host stands; two of them use the host's link with
        itself. Raises ValueError if there is no way.
        """
        start, goal = _place(source), _place(target)
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
        raise ValueError(f"machine {self.name}: no link leads from {start!r} to {goal!r}")

    def _hop_within(self, place: str) -> Hop:
        for link in self.links:
            if link.between == (place, place):
                return Hop(place, place, link)
        raise ValueError(
            f"machine {self.name}: two workers on {place!r} need a link between "
            f"[{place!r}, {place!r}], through which its processes exchange messages"
        )

    def _hops_from(self, place: str) -> Iterator[Hop]:
        for link in self.links:
            one, other = link.between
            if place == one != other:
                yield Hop(one, other, link)
            elif place == other != one:
                yield Hop(other, one, link)


def _place(device: Device) -> str:
    return device.host if device.kind == "cpu" else device.name
