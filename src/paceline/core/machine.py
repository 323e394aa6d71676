"""A machine: everything that a plan may run on, and the ways between."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from paceline.core.errors import InvalidInput
from paceline.core.facts import Fact, Name
from paceline.core.network import Hop, Link, Network
from paceline.core.stations import (
    CodecSpeed,
    Device,
    Host,
    Station,
    Switch,
    codec_speed,
    place_of,
)

__all__ = [
    "CodecSpeed",
    "Device",
    "Flow",
    "Hop",
    "Host",
    "Link",
    "Machine",
    "Peers",
    "Station",
    "Switch",
    "codec_speed",
    "place_of",
]

_MOST_LISTED = 12  # names in a message


class Peers(NamedTuple):
    """All `num_ranks` of a ring. Between neighbours of `stations` are all its ways.

    A way that many pairs of neighbours have the like of may stand there once.
    """

    stations: tuple[Station, ...]
    num_ranks: int


class Flow(NamedTuple):
    """A way, and how many messages take each of its hops at once."""

    route: tuple[Hop, ...]
    load: Mapping[Hop, int]


class Machine(Fact):
    """Everything that a plan may run on. The order of the devices is the order of the ranks.

    `groups` says how many hosts, in their order, form a group, how many groups a larger one, and so
    on: hierarchical exchanges go group by group. Their product is the number of hosts.
    """

    name: Annotated[Name, Field(examples=["my-machine"])]
    hosts: tuple[Host, ...]
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    switches: tuple[Switch, ...] = ()
    groups: tuple[Annotated[int, Field(ge=1)], ...] = ()

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        hosts = {host.name for host in self.hosts}
        stations: tuple[Station | Switch, ...] = (*self.hosts, *self.devices, *self.switches)
        count = Counter(station.name for station in stations)
        twice = [name for name, times in count.items() if times > 1]
        if twice:
            raise ValueError(f"names must be unique, but {_listed(twice)} stand twice")
        for device in self.devices:
            if device.host not in hosts:
                raise ValueError(
                    f"devices.{device.name}.host: no host {device.host!r}; known: {_listed(hosts)}"
                )
        for link in self.links:
            for end in link.between:
                if end not in count:
                    raise ValueError(
                        f"links.{link.name}.between: nothing is called {end!r}; "
                        f"known: {_listed(count)}"
                    )
        return self

    @model_validator(mode="after")
    def _groups_hold_all_hosts(self) -> Self:
        if self.groups and prod(self.groups) != self.num_hosts:
            raise ValueError(
                f"groups: {list(self.groups)} hold {prod(self.groups)} hosts; "
                f"the product must be {self.num_hosts}, the number of hosts"
            )
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields; what was derived from the old ones is not taken over."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.hosts)

    @property
    def num_devices(self) -> int:
        """How many devices there are: the most workers that find one each."""
        return len(self.devices)

    def for_workers(self, workers: int, symmetric: bool = False) -> "Machine":
        """Return the machine on which so many workers are planned: this one.

        Of a declared cluster it is a part, or, for a strategy whose plans are `symmetric`, what
        stands for all of it.
        """
        return self

    def first_devices(self, workers: int) -> tuple[Device, ...]:
        """Return the devices of so many workers; InvalidInput if there are fewer."""
        if len(self.devices) < workers:
            raise InvalidInput(
                f"workers: {workers} do not fit on machine {self.name!r}, "
                f"which has {len(self.devices)} devices"
            )
        return self.devices[:workers]

    def peers(self, stations: Sequence[Station]) -> Peers:
        """Return all stations that these stand for: themselves."""
        return Peers(tuple(stations), len(stations))

    def flow(self, level: int) -> Flow:
        """Return the way from the first host to the next one of its ring in the groups of a level.

        Each host sends to the next one of its own ring at once: to the host that stands where it
        stands, in the next group of its larger group. InvalidInput if the two are not linked.
        """
        hosts, size, apart = self.hosts, self.groups[level], prod(self.groups[:level])
        load: Counter[Hop] = Counter()
        for i, host in enumerate(hosts):
            is_last = i // apart % size == size - 1
            load.update(self.route(host, hosts[i - (size - 1) * apart if is_last else i + apart]))
        return Flow(self.route(hosts[0], hosts[apart]), load)

    def host_of(self, device: Device) -> Host:
        """Return the host that the device belongs to."""
        return self._host_called[device.host]

    @cached_property
    def _host_called(self) -> dict[str, Host]:
        return {host.name: host for host in self.hosts}

    @cached_property
    def network(self) -> Network:
        """The links, and the ways over them."""
        return Network(self.links)

    def link_within(self, place: str) -> Link | None:
        """Return what processes on a host exchange messages through, if that is known."""
        return self.network.within(place)

    def route(self, source: Station, target: Station) -> tuple[Hop, ...]:
        """Return the way with the fewest hops, the wider one where two are equal.

        The cores of a host stand where their host stands; two of them use the host's link with
        itself. InvalidInput if there is no way.
        """
        start, goal = place_of(source), place_of(target)
        if start == goal:
            return (self._hop_within(start),)
        way = self.network.way(start, goal)
        if way is None:
            raise InvalidInput(f"machine {self.name}: no link leads from {start!r} to {goal!r}")
        return way

    def _hop_within(self, place: str) -> Hop:
        link = self.link_within(place)
        if link is None:
            raise InvalidInput(
                f"machine {self.name}: two workers on {place!r} need a link between "
                f"[{place!r}, {place!r}], through which its processes exchange messages"
            )
        return Hop(place, place, link)


def _listed(names: Collection[str]) -> str:
    some = sorted(names)[:_MOST_LISTED]
    return str(some) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "")
