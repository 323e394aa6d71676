r"""Clusters of equal nodes, declared by a node and levels of switches, planned by symmetry.

    level 1            switch                    switch
                 /       |       \          /       |       \
    level 0   switch  switch  switch     switch  switch  switch
              / | \    / | \   / | \      / | \   / | \   / | \
    nodes     n n n    n n n   n n n      n n n   n n n   n n n

If every device has a worker, all nodes do the same work at the same time. So the tasks of one node
represent all nodes. Exchanges are priced on a few nodes that include every kind of route in the
cluster, with the cluster's number of ranks.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paceline.core.errors import InvalidInput
from paceline.core.facts import BytesPerSecond, Fact, Name, Seconds, Source
from paceline.core.machine import Device, Flow, Host, Machine, RingPeers, Station, Switch
from paceline.core.network import Hop, Link

# Most workers planned one by one, which takes about 5 s. Symmetric strategies, which may try many
# chunk sizes, have the second limit if workers do not fill all nodes.
_MOST_EXPANDED, _MOST_UNEVEN = 512, 128
_KINDS = 2  # number of members below a switch that have all kinds of routes


class Level(Fact):
    """A level of switches, each of which joins `count` members.

    Members are nodes on the first level, and switches of the level below on other levels. Each
    member has one link to its switch, which all nodes below the member share. The link's rate in
    each direction is `bandwidth_bytes_per_s`, divided by `oversubscription`: the ratio of the rate
    at which members can send to the rate at which switches forward. `share`, `latency_s`, `rails`
    and `rdma` are fields of this link.
    """

    name: Name
    count: Annotated[int, Field(ge=1, le=2**31, examples=[32])]
    bandwidth_bytes_per_s: Annotated[BytesPerSecond, Field(gt=0)]
    latency_s: Annotated[Seconds, Field(ge=0)]
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    rails: Annotated[int, Field(ge=1, le=64)] = 1
    rdma: bool = False
    source: Source

    def link(self, between: tuple[str, str]) -> Link:
        """Return the link of a member with its switch."""
        return Link(
            between=between,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s / self.oversubscription,
            latency_s=self.latency_s,
            share=self.share,
            rails=self.rails,
            rdma=self.rdma,
            source=self.source,
        )


class Symmetric(Machine):
    """Some nodes of a cluster that represent all `num_nodes` full nodes.

    The workers of a plan are the first host's devices. `groups` are the cluster's.
    """

    num_nodes: Annotated[int, Field(ge=1)]

    @property
    def num_hosts(self) -> int:
        """The number of hosts that the first one represents, including itself."""
        return self.num_nodes

    @property
    def num_devices(self) -> int:
        """The number of devices that the first host's devices represent."""
        return self.num_nodes * len(self._representatives)

    @cached_property
    def _representatives(self) -> tuple[Device, ...]:
        first = self.hosts[0].name
        return tuple(device for device in self.devices if device.host == first)

    def first_devices(self, workers: int) -> tuple[Device, ...]:
        """Return the devices of the first host; InvalidInput if `workers` do not fill all nodes."""
        if workers != self.num_devices:
            problem = f"must be {self.num_devices}, all devices of {self.name!r}"
            raise InvalidInput("workers", problem, got=workers)
        return self._representatives

    def peers(self, stations: Sequence[Station]) -> RingPeers:
        """Return this machine's devices or hosts, and their total number in the cluster.

        `stations`: all devices of the first host, or the host itself.
        """
        alike = self.hosts if isinstance(stations[0], Host) else self.devices
        return RingPeers(tuple(alike), self.num_nodes * len(stations))

    def flow(self, level: int) -> Flow:
        """Return the first host's route to the next host of a level's ring, and the hops' loads.

        The route goes up through switches, and down again. Each of its links carries the messages
        of all nodes below the link's lower end.
        """
        apart = prod(min(size, _KINDS) for size in self.groups[:level])
        route = self.route(self.hosts[0], self.hosts[apart])
        shares = [prod(self.groups[:below]) for below in range(level + 1)]
        load: dict[Hop, int] = dict(zip(route, [*shares, *reversed(shares)], strict=True))
        return Flow(route, load)


class Cluster(Machine):
    """Equal nodes below levels of switches; the first level is next to the nodes.

    Its hosts, devices and links are those of one node; `for_workers` returns a machine with more
    nodes. Workers fill the nodes in order.
    """

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _declares_a_node(self) -> Self:
        if len(self.hosts) != 1:
            problem = f"must be one host, the node of the cluster (got {len(self.hosts)})"
            raise ValueError(f"hosts: {problem}")
        if self.groups:
            raise ValueError("groups: cannot be combined with levels")
        names = [self.hosts[0].name, *(level.name for level in self.levels)]
        if len(set(names)) != len(names):
            raise ValueError(f"levels: must have different names, also from the host (got {names})")
        return self

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return prod(level.count for level in self.levels)

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes."""
        return self.num_nodes * len(self.devices)

    def for_workers(self, workers: int, symmetric: bool = False) -> Machine:
        """Return the machine of the nodes that `workers` workers fill.

        If `symmetric` is set and the workers fill two or more nodes completely, this is a
        `Symmetric` machine. InvalidInput for more workers than devices, or for too many workers to
        plan one by one.
        """
        self._check_count(workers, symmetric)
        num_nodes = -(-workers // len(self.devices))
        # Members of the fullest switch on each level used by these nodes.
        members, groups = num_nodes, []
        for level in self.levels:
            if members > 1:
                groups.append(min(members, level.count))
                members = -(-members // level.count)
        full = tuple(groups) if prod(groups) == num_nodes else ()
        if symmetric and num_nodes > 1 and num_nodes * len(self.devices) == workers:
            # A few members below each switch cover all kinds of routes.
            sizes = [min(size, _KINDS) for size in groups]
            return Symmetric(**self._nodes(prod(sizes), sizes, full), num_nodes=num_nodes)
        sizes = [level.count for level in self.levels]
        return Machine(**self._nodes(num_nodes, sizes, full))

    def _check_count(self, workers: int, symmetric: bool) -> None:
        """Raise InvalidInput if workers do not fit, or would take too long to plan."""
        size, hint = len(self.devices), ""
        fewer = workers - workers % size
        if not 1 <= workers <= self.num_devices:
            problem = f"must be 1 to {self.num_devices}, the devices of cluster {self.name!r}"
        elif symmetric and workers > max(_MOST_UNEVEN, fewer):
            problem = f"must fill all nodes of {size} devices if there are over {_MOST_UNEVEN}"
            hint = f"try {fewer} or {fewer + size}"
        elif not symmetric and workers > _MOST_EXPANDED:
            problem = f"must be at most {_MOST_EXPANDED} to plan this strategy"
        else:
            return
        raise InvalidInput("workers", problem, got=workers, hint=hint)

    def _nodes(
        self, num_nodes: int, sizes: Sequence[int], groups: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return the fields of a machine of nodes; `sizes`: members of a switch on each level."""
        (host,) = self.hosts
        names = [f"{host.name}{i}" for i in range(num_nodes)]
        nodes = [self._node(host, name) for name in names]
        parts = {
            field: [part for node in nodes for part in getattr(node, field)]
            for field in ("hosts", "devices", "links", "switches")
        }
        for level, size in zip(self.levels, sizes, strict=False):
            if len(names) > 1:
                above = [f"{level.name}{i}" for i in range(-(-len(names) // size))]
                parts["switches"] += [Switch(name=name, source=level.source) for name in above]
                pairs = ((name, above[i // size]) for i, name in enumerate(names))
                parts["links"] += [level.link(pair) for pair in pairs]
                names = above
        fields = {field: tuple(found) for field, found in parts.items()}
        return fields | {"name": self.name, "groups": groups, "losses": self.losses}

    def _node(self, host: Host, name: str) -> Machine:
        """Return the node under another name, which prefixes the names of its parts."""

        def renamed(own: str) -> str:
            return name if own == host.name else f"{name}.{own}"

        def parts(known: Sequence[Any], **facts: object) -> tuple[Any, ...]:
            return tuple(
                one.model_copy(update={"name": renamed(one.name)} | facts) for one in known
            )

        links = tuple(
            link.model_copy(update={"between": tuple(map(renamed, link.between))})
            for link in self.links
        )
        return self.model_copy(
            update={
                "hosts": parts(self.hosts),
                "devices": parts(self.devices, host=name),
                "switches": parts(self.switches),
                "links": links,
            }
        )
