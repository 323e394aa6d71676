r"""Clusters of equal nodes, declared as one node and levels of switches.

    level 1            switch                    switch
                 /       |       \          /       |       \
    level 0   switch  switch  switch     switch  switch  switch
              / | \    / | \   / | \      / | \   / | \   / | \
    nodes     n n n    n n n   n n n      n n n   n n n   n n n

If every device has a worker, all nodes do the same work at the same time, so a plan contains only
the tasks of one node. The time of an exchange follows from the number of ranks in the cluster, and
from the routes between a few nodes, chosen so that they include every kind of route.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from paceline.core.errors import InvalidInput
from paceline.core.facts import BytesPerSecond, Fact, Name, Seconds, Source
from paceline.core.machine import Device, Host, Machine, RingPeers, Station, Switch
from paceline.core.network import Hop, Link

# `_MOST_EXPANDED`: maximum number of workers in a plan with every worker's tasks; planning takes
# about 5 s. `_MOST_UNEVEN`: maximum number that need not fill all nodes, for a strategy that else
# plans only one node; it may then plan every worker's tasks for many chunk sizes.
_MOST_EXPANDED, _MOST_UNEVEN = 512, 128
_KINDS = 2  # a plan keeps two members of a switch: their routes are of every kind


class Level(Fact):
    """A level of switches; each switch joins `count` members.

    On the first level the members are nodes; on other levels they are switches of the level below.
    A member has one link to its switch, which all nodes below the member share. The link's rate in
    each direction is `bandwidth_bytes_per_s` / `oversubscription`. `oversubscription`: rate that a
    switch's members can send, divided by the rate that the switch forwards. `share`, `latency_s`,
    `rails` and `rdma`: as in `Link`.
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
        """Return the link between a member and its switch; `between`: the names of both."""
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
    """A few nodes of a cluster, which represent all `num_nodes` nodes with workers.

    `hosts` has only these few nodes, and a plan has only the workers of the first node.
    `groups`: as in `Machine`, but for all `num_nodes` nodes, not only these few.
    """

    num_nodes: Annotated[int, Field(ge=1)]

    @property
    def num_hosts(self) -> int:
        """The number of nodes that the first host represents."""
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
        """Return the ring of all ranks of the `num_nodes` nodes.

        `stations`: the ranks of the first node: either its host, or its devices.
        """
        alike = self.hosts if isinstance(stations[0], Host) else self.devices
        return RingPeers(tuple(alike), self.num_nodes * len(stations))

    def flow(self, level: int) -> tuple[tuple[Hop, ...], Mapping[Hop, int]]:
        """Return the first host's route to its successor in a ring, and messages per hop.

        `level`: index into `groups`; the ring joins `groups[level]` groups, as in `Machine.flow`.
        """
        apart = prod(min(size, _KINDS) for size in self.groups[:level])
        route = self.route(self.hosts[0], self.hosts[apart])
        # The route goes up through switches and down again. A link to a higher switch carries the
        # messages of all nodes below it.
        shares = [prod(self.groups[:below]) for below in range(level + 1)]
        return route, dict(zip(route, [*shares, *reversed(shares)], strict=True))


class Cluster(Machine):
    """Equal nodes, joined by levels of switches; the first of `levels` joins the nodes.

    `hosts`, `devices` and `links` describe a single node; `for_workers` returns a machine with all
    nodes that the workers need. Workers fill the nodes in order.
    """

    levels: Annotated[tuple[Level, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _declares_a_node(self) -> Self:
        if len(self.hosts) != 1:
            problem = f"must be a single host if there are levels (got {len(self.hosts)})"
            raise ValueError(f"hosts: {problem}")
        if self.groups:
            raise ValueError("groups: cannot be combined with levels")
        names = [self.hosts[0].name, *(level.name for level in self.levels)]
        if len(set(names)) != len(names):
            raise ValueError(f"levels: names must differ, also from the host's (got {names})")
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
        """Return a machine with only the nodes that the workers use.

        If `symmetric` is true, and the workers use all devices of two or more nodes, returns a
        `Symmetric`. Raises InvalidInput if there are more workers than devices, or too many workers
        to plan one by one.
        """
        self._check_count(workers, symmetric)
        num_nodes = -(-workers // len(self.devices))
        # `groups`: for each level, the largest number of members of a switch that have workers.
        members, groups = num_nodes, []
        for level in self.levels:
            if members > 1:
                groups.append(min(members, level.count))
                members = -(-members // level.count)
        full = tuple(groups) if prod(groups) == num_nodes else ()
        if symmetric and num_nodes > 1 and num_nodes * len(self.devices) == workers:
            # Keep at most `_KINDS` members of each switch: their routes are of every kind.
            sizes = [min(size, _KINDS) for size in groups]
            return Symmetric(**self._nodes(prod(sizes), sizes, full), num_nodes=num_nodes)
        sizes = [level.count for level in self.levels]
        return Machine(**self._nodes(num_nodes, sizes, full))

    def _check_count(self, workers: int, symmetric: bool) -> None:
        """Raise InvalidInput for more workers than devices, and if a plan would take too long."""
        size, hint = len(self.devices), ""
        fewer = workers - workers % size
        if not 1 <= workers <= self.num_devices:
            problem = f"must be 1 to {self.num_devices}, the devices of cluster {self.name!r}"
        elif symmetric and workers > max(_MOST_UNEVEN, fewer):
            problem = f"must be a multiple of {size}, a node's devices, if over {_MOST_UNEVEN}"
            hint = f"try {fewer} or {fewer + size}"
        elif not symmetric and workers > _MOST_EXPANDED:
            problem = f"must be at most {_MOST_EXPANDED} to plan this strategy"
        else:
            return
        raise InvalidInput("workers", problem, got=workers, hint=hint)

    def _nodes(
        self, num_nodes: int, sizes: Sequence[int], groups: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return the fields of a `Machine` of `num_nodes` nodes.

        `sizes`: maximum number of members of a switch, for each level.
        """
        names = [f"{self.hosts[0].name}{i}" for i in range(num_nodes)]
        nodes = [self._node(name) for name in names]
        parts = {field: [part for node in nodes for part in node[field]] for field in nodes[0]}
        for level, size in zip(self.levels, sizes, strict=False):
            if len(names) > 1:
                above = [f"{level.name}{i}" for i in range(-(-len(names) // size))]
                parts["switches"] += [Switch(name=name, source=level.source) for name in above]
                pairs = ((name, above[i // size]) for i, name in enumerate(names))
                parts["links"] += [level.link(pair) for pair in pairs]
                names = above
        fields = {field: tuple(found) for field, found in parts.items()}
        return fields | {"name": self.name, "groups": groups, "losses": self.losses}

    def _node(self, name: str) -> dict[str, list[Any]]:
        """Return copies of the declared node's hosts, devices, switches and links, by field.

        The copy of the host is called `name`; the copy of PART is called NAME.PART.
        """

        def renamed(own: str) -> str:
            return name if own == self.hosts[0].name else f"{name}.{own}"

        def parts(known: Sequence[Any], **facts: object) -> list[Any]:
            return [one.model_copy(update={"name": renamed(one.name)} | facts) for one in known]

        return {
            "hosts": parts(self.hosts),
            "devices": parts(self.devices, host=name),
            "switches": parts(self.switches),
            "links": [
                link.model_copy(update={"between": tuple(map(renamed, link.between))})
                for link in self.links
            ],
        }
