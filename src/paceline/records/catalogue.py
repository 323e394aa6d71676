"""Links and devices by name, and machines of equal devices that are described by these names.

    name = "two-of-8xv100"
    [equal]
    device = "v100"
    devices = 8          # of a host
    hosts = 2
    link = "nvlink2"     # between the devices of a host; by default what the device has
    network = "25gbe"    # between hosts
    rails = 1            # network adapters of a host, each of which has this network's rate

Devices of a host exchange messages over `link`, each at its full rate but for what all of them
share; to the host's memory and the network they go over PCI Express.
"""

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from paceline.core.cluster import Cluster, Level
from paceline.core.errors import InvalidInput
from paceline.core.facts import Bytes, BytesPerSecond, Fact, FlopsPerSecond, Name, Seconds, Source
from paceline.core.losses import Losses
from paceline.core.machine import Device, DeviceKind, Host, Machine, Switch
from paceline.core.names import not_known
from paceline.core.network import Link
from paceline.core.reading import first_fault

# What layers reach of a data sheet: large convolutions of its arithmetic, copies of its memory.
_FLOPS_REACHED, _MEMORY_REACHED = 0.68, 0.8
_HALF_REACHED = 0.45  # of tensor cores, which layers keep less busy
_CALL_S = 5e-6
# Of servers, for each GPU: half a socket's cores, memory, and its channels' bandwidth.
_HOST_CORES, _HOST_NBYTES, _HOST_BYTES_PER_S = 6, 64e9, 16e9
_BY_NAME = re.compile(
    r"(?:(?P<hosts>\d+)x)?(?P<devices>\d+)x(?P<device>[a-z][a-z0-9-]*)(?:\+(?:(?P<rails>\d+)x)?(?P<network>[a-z0-9-]+))?"
)
_SWITCH, _LINKS = "switch", "links"  # between hosts, and between the devices of one


class KnownLink(Fact):
    """A link as its standard has it, the share of it that exchanges reach, and what it costs.

    `together_bytes_per_s`: what messages of all devices of a host reach together, where they share
    a way; None: each its own. `rdma`: adapters between hosts read and write the GPUs' memory.
    """

    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    share: Annotated[float, Field(gt=0, le=1)]
    together_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)] | None = None
    latency_s: Annotated[Seconds, Field(ge=0)]
    rdma: bool = False
    source: Source


class KnownModel(Fact):
    """A model of GPU as its data sheet has it, and the links of several of them.

    `link` joins them, and `bus` each with the host.
    """

    flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)]
    half_flops_per_s: Annotated[FlopsPerSecond, Field(gt=0)] | None = None
    memory_bytes: Annotated[Bytes, Field(gt=0)]
    memory_bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    link: Name
    bus: Name
    source: Source


class _Catalogue(Fact):
    links: dict[str, KnownLink]
    devices: dict[str, KnownModel]


@cache
def _catalogue() -> _Catalogue:
    file = resources.files(__package__).joinpath("catalogue.toml")
    return _Catalogue.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))


def known_link(name: str) -> KnownLink:
    """Return the link of that name; InvalidInput lists the known ones if there is none."""
    known = _catalogue().links
    if name not in known:
        raise not_known("link", name, sorted(known))
    return known[name]


def known_model(name: str) -> KnownModel:
    """Return the model of GPU of that name; InvalidInput lists the known ones."""
    known = _catalogue().devices
    if name not in known:
        raise not_known("device", name, sorted(known))
    return known[name]


class EqualDevices(Fact):
    """So many equal devices on each of some equal hosts, all by their names in the catalogue."""

    device: Annotated[Name, Field(examples=["v100"])]
    devices: Annotated[int, Field(ge=1, le=64, examples=[8])]
    hosts: Annotated[int, Field(ge=1, le=65536)] = 1
    link: Name | None = None
    network: Name | None = None
    rails: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _is_joined(self) -> Self:
        if self.hosts > 1 and self.network is None:
            raise ValueError('network: several hosts need one between them, such as "25gbe"')
        if self.rails > 1 and self.hosts == 1:
            raise ValueError("rails: a single host has no network between hosts; leave them out")
        return self

    def machine(self, name: str, losses: Losses | None = None) -> Machine:
        """Return the machine, a cluster of several hosts; InvalidInput for unknown names."""
        model = known_model(self.device)
        link = self.link or model.link
        stated = {} if losses is None else {"losses": losses}
        fields: dict[str, Any] = {
            "name": name,
            "hosts": (self._host(),),
            "devices": tuple(self._device(number, model) for number in range(self.devices)),
            **self._joined(link, model.bus),
            **stated,
        }
        if self.hosts == 1:
            return Machine(**fields)
        assert self.network is not None
        net = known_link(self.network)
        level = Level(
            name=_SWITCH,
            count=self.hosts,
            bandwidth_bytes_per_s=net.bandwidth_bytes_per_s,
            latency_s=net.latency_s / 2,
            share=net.share,
            rails=self.rails,
            rdma=net.rdma,
            source=net.source,
        )
        return Cluster(**fields, levels=(level,))

    def _host(self) -> Host:
        count = self.devices
        return Host(
            name="host",
            cores=_HOST_CORES * count,
            memory_bytes=_HOST_NBYTES * count,
            memory_bandwidth_bytes_per_s=_HOST_BYTES_PER_S * count,
            source="usual of servers with so many GPUs",
        )

    def _device(self, number: int, model: KnownModel) -> Device:
        half = model.half_flops_per_s
        return Device(
            name=f"gpu{number}",
            host="host",
            kind=DeviceKind.GPU,
            flops_per_s=_FLOPS_REACHED * model.flops_per_s,
            half_flops_per_s=None if half is None else _HALF_REACHED * half,
            memory_bytes=model.memory_bytes,
            memory_bandwidth_bytes_per_s=_MEMORY_REACHED * model.memory_bandwidth_bytes_per_s,
            call_latency_s=_CALL_S,
            source=model.source,
        )

    def _joined(self, link: str, bus: str) -> dict[str, Any]:
        """Return the links, and a switch where devices are not joined by the host's bus alone."""
        known = known_link(link)
        own = [f"gpu{number}" for number in range(self.devices)]
        links = [_link((device, "host"), known_link(bus)) for device in own]
        if link == bus:
            return {"links": tuple(links)}
        links += [_link((device, _LINKS), known) for device in own]
        if known.together_bytes_per_s is not None:
            links.append(
                Link(
                    between=(_LINKS, _LINKS),
                    bandwidth_bytes_per_s=known.together_bytes_per_s,
                    latency_s=0.0,
                    source=known.source,
                )
            )
        return {"links": tuple(links), "switches": (Switch(name=_LINKS, source=known.source),)}


def _link(between: tuple[str, str], known: KnownLink) -> Link:
    # A message between two devices takes two of these.
    return Link(
        between=between,
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s,
        share=known.share,
        latency_s=known.latency_s / 2,
        source=known.source,
    )


class EqualFile(Fact):
    """A machine file of equal devices."""

    name: Annotated[Name, Field(examples=["my-machine"])]
    equal: EqualDevices
    losses: Losses | None = None

    @property
    def machine(self) -> Machine:
        """The machine; InvalidInput for names that the catalogue does not have."""
        return self.equal.machine(self.name, self.losses)


def by_name(text: str) -> Machine | None:
    """Return the machine that a name such as "8xv100" or "4x8xv100+25gbe" describes, or None.

    These are eight devices, and four hosts of eight each. InvalidInput for unknown parts.
    """
    match = _BY_NAME.fullmatch(text)
    if match is None:
        return None
    given = {key: value for key, value in match.groupdict().items() if value is not None}
    try:
        return EqualDevices.model_validate(given).machine(text.replace("+", "."))
    except ValidationError as error:
        raise InvalidInput("machine", f"{text}: {first_fault(error)}") from None
