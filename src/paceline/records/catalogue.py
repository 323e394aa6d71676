"""Known links and GPU models, and machines of equal devices that use these names.

    name = "two-of-8xv100"
    [equal]
    device = "v100"
    devices = 8          # of a host
    hosts = 2
    link = "nvlink2"     # between the devices of a host; by default the GPU model's link
    network = "25gbe"    # between hosts
    rails = 1            # network adapters of a host, each with the rate of `network`

Devices of a host exchange messages over `link`. Each device has the link's full rate, unless the
devices share a bus. Devices reach the host's memory and the network over PCI Express.
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

# Shares of a data sheet's flop/s and memory bandwidth that large convolutions and copies reach.
_FLOPS_REACHED, _MEMORY_REACHED = 0.68, 0.8
_HALF_REACHED = 0.45  # share of the data sheet's tensor-core rate that convolutions reach
_CALL_S = 5e-6
# Cores, memory and memory bandwidth that a host has for each of its GPUs: half a CPU socket.
_HOST_CORES, _HOST_NBYTES, _HOST_BYTES_PER_S = 6, 64e9, 16e9
_BY_NAME = re.compile(
    r"(?:(?P<hosts>\d+)x)?(?P<devices>\d+)x(?P<device>[a-z][a-z0-9-]*)(?:\+(?:(?P<rails>\d+)x)?(?P<network>[a-z0-9-]+))?"
)
_SWITCH, _LINKS = "switch", "links"  # names of the switches between hosts and inside a host


class KnownLink(Fact):
    """A link's nominal rate, the share of the rate that exchanges reach, and its latency.

    `together_bytes_per_s`: combined rate of all devices of a host, if they share a bus. `rdma`:
    network adapters access the GPUs' memory directly.
    """

    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    share: Annotated[float, Field(gt=0, le=1)]
    together_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)] | None = None
    latency_s: Annotated[Seconds, Field(ge=0)]
    rdma: bool = False
    source: Source

    @property
    def half(self) -> dict[str, Any]:
        """Fields of one of two links that form a route; each has half the latency."""
        return {
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "share": self.share,
            "latency_s": self.latency_s / 2,
            "source": self.source,
        }


class KnownModel(Fact):
    """A GPU model by its data sheet, and its links.

    `link` connects GPUs, and `bus` connects each GPU with the host.
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
    """Look up a link; InvalidInput lists the known names."""
    links = _catalogue().links
    if name not in links:
        raise not_known("link", name, sorted(links))
    return links[name]


class EqualDevices(Fact):
    """Equal devices on equal hosts, described by names from the catalogue.

    `device`: a GPU model. `devices`: number of devices on each host. `link`: link between the
    devices of a host; by default the GPU model's link. `network`: network between hosts. `rails`:
    number of network adapters of each host.
    """

    device: Annotated[Name, Field(examples=["v100"])]
    devices: Annotated[int, Field(ge=1, le=64, examples=[8])]
    hosts: Annotated[int, Field(ge=1, le=65536)] = 1
    link: Name | None = None
    network: Name | None = None
    rails: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _is_joined(self) -> Self:
        if self.hosts > 1 and self.network is None:
            raise ValueError('network: must be given for several hosts, for example "25gbe"')
        if self.rails > 1 and self.hosts == 1:
            raise ValueError("rails: must be 1 for a single host, which has no network")
        return self

    def machine(self, name: str, losses: Losses | None = None) -> Machine:
        """Build the machine; with several hosts, the result is a cluster.

        Raises InvalidInput for unknown names.
        """
        models = _catalogue().devices
        if self.device not in models:
            raise not_known("device", self.device, sorted(models))
        model = models[self.device]
        fields: dict[str, Any] = {
            "name": name,
            "hosts": (self._host(),),
            "devices": tuple(self._device(number, model) for number in range(self.devices)),
            "losses": losses,
            **self._joined(self.link or model.link, model.bus),
        }
        if self.hosts == 1 or self.network is None:
            return Machine(**fields)
        net = known_link(self.network)
        own = {"name": _SWITCH, "count": self.hosts, "rails": self.rails, "rdma": net.rdma}
        return Cluster(**fields, levels=(Level(**own, **net.half),))

    def _host(self) -> Host:
        count = self.devices
        return Host(
            name="host",
            cores=_HOST_CORES * count,
            memory_bytes=_HOST_NBYTES * count,
            memory_bandwidth_bytes_per_s=_HOST_BYTES_PER_S * count,
            source="typical server for this number of GPUs",
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
        """Return the machine's `links`, and its `switches` if GPUs have a link besides the bus."""
        known = known_link(link)
        gpus = [f"gpu{number}" for number in range(self.devices)]
        links = [Link(between=(gpu, "host"), **known_link(bus).half) for gpu in gpus]
        if link == bus:
            return {"links": tuple(links)}
        links += [Link(between=(gpu, _LINKS), **known.half) for gpu in gpus]
        if known.together_bytes_per_s is not None:
            rate = known.together_bytes_per_s
            shared: dict[str, Any] = {"bandwidth_bytes_per_s": rate, "latency_s": 0.0}
            links.append(Link(between=(_LINKS, _LINKS), source=known.source, **shared))
        return {"links": tuple(links), "switches": (Switch(name=_LINKS, source=known.source),)}


class EqualFile(Fact):
    """A machine file of equal devices."""

    name: Annotated[Name, Field(examples=["my-machine"])]
    equal: EqualDevices
    losses: Losses | None = None

    @property
    def machine(self) -> Machine:
        """The machine; InvalidInput for names that are not in the catalogue."""
        return self.equal.machine(self.name, self.losses)


def by_name(text: str) -> Machine | None:
    """Build a machine from a name such as "8xv100" or "4x8xv100+25gbe"; None for other names.

    "4x8xv100+25gbe" are four hosts with eight GPUs each. Raises InvalidInput if a name of this form
    contains an unknown GPU model or network.
    """
    match = _BY_NAME.fullmatch(text)
    if match is None:
        return None
    given = {key: value for key, value in match.groupdict().items() if value is not None}
    try:
        return EqualDevices.model_validate(given).machine(text.replace("+", "."))
    except ValidationError as error:
        fault = InvalidInput.of(first_fault(error))
        raise InvalidInput("machine", f"{text}: {fault}") from None
