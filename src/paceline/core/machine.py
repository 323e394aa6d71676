"""A machine: hosts, devices, switches, and the links between them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from math import inf, prod
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from paceline.core.errors import InvalidInput
from paceline.core.facts import (
    Bytes,
    BytesPerSecond,
    Fact,
    FlopsPerSecond,
    Name,
    Seconds,
    Source,
    ValuesPerSecond,
)
from paceline.core.losses import BETWEEN_HOSTS, CORES_BETWEEN_HOSTS, WITHIN_A_HOST, Losses
from paceline.core.names import not_known
from paceline.core.network import Hop, Link, Network
from paceline.core.wire_format import Kernel, WireFormat


class CodecSpeed(Fact):
    """Rates of a codec kernel in values per second, with all cores of a device.

    `decode_values_per_s`: mean of two rates, without and with adding the decoded values.
    `latency_s`: fixed time (buffers and threads) to encode a piece, and again to decode it.
    Infinite rates mean that the links' times include encoding and decoding.
    """

    encode_values_per_s: Annotated[ValuesPerSecond, Field(gt=0)]
    decode_values_per_s: Annotated[ValuesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)] = 0.0

    @property
    def is_within_links(self) -> bool:
        """Whether the links' times include encoding and decoding."""
        return self.encode_values_per_s == self.decode_values_per_s == inf


class Host(Fact):
    """A computer: its cores and its memory.

    `memory_bandwidth_bytes_per_s`: rate of copies and sums in memory, counting reads and writes.
    `reduce_latency_s`: latency of each sum of the ranks' gradients, from the last rank's arrival
    until all ranks know of the result. `codecs`: speed at which the cores encode and decode when
    the host sums gradients of GPUs. `samples_per_s`: rate at which the cores read and decode
    samples; None: no limit. `message_bytes_per_s`: total rate at which a hub and workers on this
    host send and receive, limited by encryption, checks and copies; None: no limit.
    """

    name: Annotated[Name, Field(examples=["host0"])]
    cores: Annotated[int, Field(gt=0, le=2**31, examples=[16])]
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    reduce_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    codecs: dict[Kernel, CodecSpeed] = Field(default_factory=dict)
    samples_per_s: Annotated[float, Field(gt=0)] | None = None
    message_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)] | None = None
    source: Source

    def __hash__(self) -> int:
        return hash(self.name)


class DeviceKind(StrEnum):
    """The kind of a device: CPU cores or a GPU."""

    CPU = "cpu"
    GPU = "gpu"


class Device(Fact):
    """The device of one worker: a GPU, or the CPU cores to which the worker is pinned.

    `flops_per_s` and `memory_bandwidth_bytes_per_s`: rates that layers reach, which are below those
    of the data sheet. `call_latency_s`: latency of each operation. `sync_latency_s`: latency of
    each synchronisation of a GPU with its host during backward; None: equals `call_latency_s`.
    `half_flops_per_s`: rate with two-byte values, on tensor cores if available. `codecs`: for each
    codec kernel, the speed of encoding and decoding.
    """

    name: Name
    host: Annotated[Name, Field(examples=["host0"])]
    kind: Annotated[DeviceKind, Field(examples=["gpu"])]
    flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)]
    half_flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)] | None = None
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    call_latency_s: Annotated[Seconds, Field(ge=0)] = 0.0
    sync_latency_s: Annotated[Seconds, Field(ge=0)] | None = None
    codecs: dict[Kernel, CodecSpeed] = Field(default_factory=dict)
    source: Source

    def __hash__(self) -> int:
        return hash(self.name)


class Switch(Fact):
    """A node that connects links and computes nothing."""

    name: Name
    source: Source


Station = Device | Host  # a sender or receiver of messages


def place_of(station: Station) -> str:
    """Return the name by which links refer to a device or host; for a CPU device, its host's."""
    if isinstance(station, Device) and station.kind == DeviceKind.CPU:
        return station.host
    return station.name


_CAST_NBYTES = 6  # bytes read and written per value by the kernel `cast`


def codec_speed(station: Station, wire_format: WireFormat) -> CodecSpeed:
    """Return the speed at which a device or host runs a codec; InvalidInput if it is unknown.

    If the machine file lacks the speed of kernel `cast` on a GPU, memory bandwidth determines it.
    """
    kernel = wire_format.kernel
    if kernel not in station.codecs:
        if kernel == "cast" and isinstance(station, Device) and station.kind is DeviceKind.GPU:
            values_per_s = station.memory_bandwidth_bytes_per_s / _CAST_NBYTES
            return CodecSpeed(
                encode_values_per_s=values_per_s,
                decode_values_per_s=values_per_s,
                latency_s=station.call_latency_s,
            )
        what = "device" if isinstance(station, Device) else "host"
        problem = f"needs the speed of {what} {station.name!r} to be planned"
        hint = f"add {what}s.codecs.{kernel} to the machine file"
        raise InvalidInput("codec", problem, got=wire_format.name, hint=hint)
    return station.codecs[kernel]


_MOST_LISTED = 12  # maximum number of names that an error lists


class RingPeers(NamedTuple):
    """The devices or hosts of a ring in order (`stations`), and the ring's number of ranks.

    In a large cluster, a few stations represent many equal ones, so there are more ranks.
    """

    stations: tuple[Station, ...]
    num_ranks: int


class Machine(Fact):
    """The hosts, devices and links of a plan; devices are in rank order.

    `groups`: for hierarchical exchanges, the number of consecutive hosts in a group, of groups in a
    larger group, and so on; the product is the number of hosts. `losses`: why real steps take
    longer than plans; None selects the values published for similar machines.
    """

    name: Annotated[Name, Field(examples=["my-machine"])]
    hosts: tuple[Host, ...]
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    groups: tuple[Annotated[int, Field(ge=1, le=2**31)], ...] = ()
    losses: Losses | None = None

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        hosts = {host.name for host in self.hosts}
        devices = {device.name for device in self.devices}
        stations: tuple[Station | Switch, ...] = (*self.hosts, *self.devices, *self.switches)
        count = Counter(station.name for station in stations)
        twice = [name for name, times in count.items() if times > 1]
        if twice:
            raise ValueError(f"names must be unique (twice: {', '.join(twice[:_MOST_LISTED])})")
        for device in self.devices:
            if device.host not in hosts:
                field = f"devices.{device.name}.host"
                raise ValueError(str(not_known(field, device.host, sorted(hosts))))
        for link in self.links:
            for end in link.between:
                if end not in count:
                    field = f"links.{link.name}.between"
                    raise ValueError(str(not_known(field, end, sorted(count))))
            has_adapters = len({*link.between} - devices) == 2
            if not has_adapters and (link.rails > 1 or link.rdma):
                field = f"links.{link.name}.{'rails' if link.rails > 1 else 'rdma'}"
                raise ValueError(f"{field}: requires a link between different hosts or switches")
        if self.groups and prod(self.groups) != self.num_hosts:
            problem = f"must multiply to {self.num_hosts}, the number of hosts"
            raise ValueError(f"groups: {problem} (got {list(self.groups)})")
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, and without cached properties of this machine."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def with_each(self, parts: Literal["hosts", "devices", "links"], **facts: object) -> Self:
        """Return a copy in which all hosts, devices or links (`parts`) have the values `facts`."""
        changed = tuple(part.model_copy(update=facts) for part in getattr(self, parts))
        return self.model_copy(update={parts: changed})

    @cached_property
    def reached(self) -> Self:
        """A copy with attainable bandwidths: each link's bandwidth times its `share`."""
        links = tuple(link.reached for link in self.links)
        if links == self.links:
            return self
        return self.model_copy(update={"links": links})

    @property
    def usual_losses(self) -> Losses:
        """The machine's time losses, or those published for similar machines."""
        if self.losses is not None:
            return self.losses
        if self.num_hosts == 1:
            return WITHIN_A_HOST
        has_cores = any(device.kind == DeviceKind.CPU for device in self.devices)
        return CORES_BETWEEN_HOSTS if has_cores else BETWEEN_HOSTS

    @property
    def num_hosts(self) -> int:
        """The number of hosts."""
        return len(self.hosts)

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.devices)

    def for_workers(self, workers: int, symmetric: bool = False) -> "Machine":
        """Return this machine; overridden in `Cluster`, which returns only the nodes in use."""
        return self

    def first_devices(self, workers: int) -> tuple[Device, ...]:
        """Return the first devices, one for each worker; InvalidInput if there are too few."""
        if len(self.devices) < workers:
            problem = f"must be at most {len(self.devices)}, the devices of machine {self.name!r}"
            raise InvalidInput("workers", problem, got=workers)
        return self.devices[:workers]

    def peers(self, stations: Sequence[Station]) -> RingPeers:
        """Return the ring of `stations`, each of which is one rank."""
        return RingPeers(tuple(stations), len(stations))

    def flow(self, level: int) -> tuple[tuple[Hop, ...], Mapping[Hop, int]]:
        """Return the first host's route to its successor in a ring, and messages per hop.

        `self.groups[level]` groups of hosts form a ring, in which each host sends to the host at
        the same position in the next group. All hosts send concurrently, so a hop may carry several
        messages. Raises InvalidInput if hosts are not linked.
        """
        hosts, size, apart = self.hosts, self.groups[level], prod(self.groups[:level])
        load: Counter[Hop] = Counter()
        for i, host in enumerate(hosts):
            is_last = i // apart % size == size - 1
            load.update(self.route(host, hosts[i - (size - 1) * apart if is_last else i + apart]))
        return self.route(hosts[0], hosts[apart]), load

    def host_of(self, device: Device) -> Host:
        """Return the host that the device belongs to."""
        return self._host_called[device.host]

    @cached_property
    def _host_called(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def network(self) -> Network:
        """The network of the links."""
        return Network(self.links, {switch.name for switch in self.switches})

    def route(self, source: Station, target: Station) -> tuple[Hop, ...]:
        """Return the route with the fewest hops; among these, the one with the most bandwidth.

        A CPU device is located at its host; two CPU devices of one host use the host's link to
        itself. Raises InvalidInput if there is no route.
        """
        start, goal = place_of(source), place_of(target)
        if start != goal:
            way = self.network.route(start, goal)
            if way is None:
                problem = f"has no links from {start!r} to {goal!r}"
                raise InvalidInput(f"machine {self.name}", problem)
            return way
        link = self.network.within.get(start)
        if link is None:
            problem = f"needs a link from {start!r} to itself, for messages between its workers"
            raise InvalidInput(f"machine {self.name}", problem)
        return (Hop(start, start, link),)
