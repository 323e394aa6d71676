r"""Clusters of equal nodes: declared by one node and levels of switches, planned by symmetry.

    level 1            switch                    switch
                 /       |       \          /       |       \
    level 0   switch  switch  switch     switch  switch  switch
              / | \    / | \   / | \      / | \   / | \   / | \
    nodes     n n n    n n n   n n n      n n n   n n n   n n n

Where all nodes are full, each does in a step what any other does, at the same time. So the tasks of
one stand for those of all, and what is exchanged between them is priced on a small model: it has
every kind of way that the cluster has, and the cluster's number of ranks.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paceline.core.errors import InvalidInput
from paceline.core.facts import Fact, Name, Source
from paceline.core.machine import Device, Flow, Hop, Host, Link, Machine, Peers, Station, Switch
from paceline.core.units import BytesPerSecond, Seconds

_MOST_EXPANDED = 128  # workers whose every task is planned: beyond it, plans take minutes
_KINDS = 2  # members below a switch that have the ways to each other that all members have


class Level(Fact):
    """Switches that join `count` members each: nodes on the first level, then switches.

    Each member has one link to its switch, through which all nodes below the member go:
    `bandwidth_bytes_per_s` in each direction, divided by `oversubscription`, which is how many
    times more the members can send than the switches pass on. `latency_s` is that of a message on
    this link.
    """

    name: Name
    count: Annotated[int, Field(ge=1, examples=[32])]
    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)]
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    source: Source

    def link(self, member: str, switch: str) -> Link:
        """Return the link of a member to its switch."""
        return Link(
            between=(member, switch),
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / self.oversubscription,
            latency_s=self.latency_s,
            source=self.source,
        )


class Symmetric(Machine):
    """Some nodes of a cluster that stand for `num_nodes`, all full: see above.

    The workers of a plan are the devices of the first host. `groups` are those of the cluster.
    """

    num_nodes: Annotated[int, Field(ge=1)]

    @property
    def num_hosts(self) -> int:
        """How many hosts the first one stands for, itself among them."""
        return self.num_nodes

    @property
    def num_devices(self) -> int:
        """How many devices those of the first host stand for."""
        return self.num_nodes * len(self._representatives)

    @cached_property
    def _representatives(self) -> tuple[Device, ...]:
        first = self.hosts[0].name
        return tuple(device for device in self.devices if device.host == first)

    def first_devices(self, workers: int) -> tuple[Device, ...]:
        """Return the devices of the first host; InvalidInput if they stand for others."""
        if workers != self.num_devices:
            raise InvalidInput(
                f"workers: {workers} are not the {self.num_devices} of {self.name!r}, "
                "which is planned by symmetry"
            )
        return self._representatives

    def peers(self, stations: Sequence[Station]) -> Peers:
        """Return the devices, or the hosts, of the model, and how many there are in all.

        `stations` are all devices of the first host, or that host.
        """
        alike = self.hosts if isinstance(stations[0], Host) else self.devices
        return Peers(tuple(alike), self.num_nodes * len(stations))

    def flow(self, level: int) -> Flow:
        """Return the way to the next host of the level's ring; all below a switch share its link.

        On the way up and down again the n-th link is that of a switch of so many nodes, if not of
        the node itself.
        """
        apart = prod(min(size, _KINDS) for size in self.groups[:level])
        route = self.route(self.hosts[0], self.hosts[apart])
        shares = [prod(self.groups[:below]) for below in range(level + 1)]
        load: dict[Hop, int] = dict(zip(route, [*shares, *reversed(shares)], strict=True))
        return Flow(route, load)


class Cluster(Machine):
    """Equal nodes below levels of switches, the first level next to the nodes.

    As a machine it is one of its nodes; `for_workers` gives more of it. Nodes are filled in order.
    """

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _declares_a_node(self) -> Self:
        if len(self.hosts) != 1:
            raise ValueError(
                f"hosts: a file with levels describes one node, which is one host, "
                f"not {len(self.hosts)}; levels say how often it is there"
            )
        if self.groups:
            raise ValueError("groups: levels give a cluster its own; leave them out")
        names = [self.hosts[0].name, *(level.name for level in self.levels)]
        if len(set(names)) != len(names):
            raise ValueError(f"levels: the names of node and levels must differ, not {names}")
        return self

    @property
    def num_nodes(self) -> int:
        """How many nodes the cluster has."""
        return prod(level.count for level in self.levels)

    @property
    def num_devices(self) -> int:
        """How many devices all nodes have."""
        return self.num_nodes * len(self.devices)

    def for_workers(self, workers: int, symmetric: bool = False) -> Machine:
        """Return the part of the cluster that so many workers fill, each device of which is there.

        With `symmetric` it is a `Symmetric` machine, if the workers fill more than one node, and
        all they use. InvalidInput if there are fewer devices, or for many workers otherwise.
        """
        if not 1 <= workers <= self.num_devices:
            raise InvalidInput(
                f"workers: {workers} do not fit on cluster {self.name!r}, which has "
                f"{self.num_nodes} nodes of {len(self.devices)} devices: 1 to {self.num_devices}"
            )
        num_nodes = -(-workers // len(self.devices))
        fills = num_nodes * len(self.devices) == workers
        if symmetric and fills and num_nodes > 1:
            return self._model(num_nodes)
        if workers > _MOST_EXPANDED:
            raise InvalidInput(f"workers: {self._too_many(workers, symmetric)}")
        return self._expanded(num_nodes)

    def _too_many(self, workers: int, symmetric: bool) -> str:
        if not symmetric:
            return (
                f"{workers} are too many for a strategy without symmetry, each of whose tasks is "
                f"planned; at most {_MOST_EXPANDED}"
            )
        fewer = workers - workers % len(self.devices)
        return (
            f"{workers} do not fill nodes of {len(self.devices)} devices; more than "
            f"{_MOST_EXPANDED} have to, as {fewer} or {fewer + len(self.devices)} do"
        )

    def _expanded(self, num_nodes: int) -> Machine:
        parts = _Parts(self, num_nodes, [level.count for level in self.levels])
        return Machine(**self._facts(parts, num_nodes))

    def _model(self, num_nodes: int) -> Machine:
        sizes = [min(size, _KINDS) for size in self._groups(num_nodes)]
        parts = _Parts(self, prod(sizes), sizes)
        return Symmetric(**self._facts(parts, num_nodes), num_nodes=num_nodes)

    def _facts(self, parts: "_Parts", num_nodes: int) -> dict[str, Any]:
        """Return the fields of a machine of these parts, which stand for so many nodes."""
        groups = self._groups(num_nodes)
        return {
            "name": self.name,
            "hosts": parts.hosts,
            "devices": parts.devices,
            "links": parts.links,
            "switches": parts.switches,
            "groups": groups if prod(groups) == num_nodes else (),
        }

    def _groups(self, num_nodes: int) -> tuple[int, ...]:
        """Return the members of the fullest switch of each level that so many nodes use."""
        groups, members = [], num_nodes
        for level in self.levels:
            if members > 1:
                groups.append(min(members, level.count))
                members = -(-members // level.count)
        return tuple(groups)


class _Parts:
    """Nodes of a cluster and the switches that join them, of so many members each."""

    def __init__(self, cluster: Cluster, num_nodes: int, sizes: Sequence[int]) -> None:
        self._node = cluster
        (node,) = cluster.hosts
        names = [f"{node.name}{i}" for i in range(num_nodes)]
        self.hosts = tuple(node.model_copy(update={"name": name}) for name in names)
        self.devices = tuple(
            device.model_copy(update={"name": f"{name}.{device.name}", "host": name})
            for name in names
            for device in cluster.devices
        )
        switches = [
            switch.model_copy(update={"name": f"{name}.{switch.name}"})
            for name in names
            for switch in cluster.switches
        ]
        links = [link for name in names for link in self._inside(name)]
        for level, size in zip(cluster.levels, sizes, strict=False):
            if len(names) > 1:
                above = [f"{level.name}{i}" for i in range(-(-len(names) // size))]
                switches += [Switch(name=name, source=level.source) for name in above]
                links += [level.link(name, above[i // size]) for i, name in enumerate(names)]
                names = above
        self.links, self.switches = tuple(links), tuple(switches)

    def _inside(self, node: str) -> Iterator[Link]:
        (host,) = self._node.hosts
        for link in self._node.links:
            one, other = (node if end == host.name else f"{node}.{end}" for end in link.between)
            yield link.model_copy(update={"between": (one, other)})
