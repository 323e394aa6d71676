"""Plan transfers: messages, ring all-reduces, and hierarchical exchanges between hosts."""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from paceline.core.cost import core_lanes, exchange_lane, link_lane
from paceline.core.machine import Device, DeviceKind, Host, Machine, Station
from paceline.core.network import Hop
from paceline.core.plan import Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.ring_search import rings_at_once


class Transfer(NamedTuple):
    """A transfer of bytes: the resources that it holds, and its cost."""

    on: tuple[Resource, ...]
    cost: Cost


def lanes_of(route: Sequence[Hop]) -> tuple[Resource, ...]:
    """Return the resources that a message on a route holds, one for each hop."""
    return tuple(link_lane(hop.source, hop.target) for hop in route)


_Pace = tuple[float, float]  # a route's latency, and its slowest hop's seconds per byte


@dataclass(frozen=True)
class Ring:
    """A ring all-reduce: each of n ranks sends 2 (n - 1) / n of the bytes to the next rank.

    Routes over the same hop share its bandwidth, and all ranks wait for the slowest route between
    neighbours. If direct links between GPUs (`core.ring_search`) or rails between hosts allow
    several rings, each ring carries a share of the bytes.

    `load`: for each hop, (bytes over the hop) / (bytes that one rank sends); below 1 if only some
    rings use the hop. `held`: resources that the planned ranks always hold during the exchange.
    `cores`: resources that they hold, too, if a link uses cores. `num_ranks` also counts ranks that
    the plan of a `Symmetric` machine leaves out.
    """

    num_ranks: int
    routes: tuple[tuple[Hop, ...], ...]
    load: Mapping[Hop, float]
    held: tuple[Resource, ...]
    cores: tuple[Resource, ...]

    @classmethod
    def over(
        cls, machine: Machine, stations: Sequence[Station], cores: Sequence[Resource]
    ) -> "Ring":
        """Build the ring over two or more stations; InvalidInput if they are not linked."""
        peers = machine.peers(stations)
        routes = tuple(machine.route(*pair) for pair in neighbours(peers.stations))
        return cls(peers.num_ranks, routes, _times(routes), _held(stations), tuple(cores))

    @classmethod
    def at_once(
        cls, machine: Machine, stations: Sequence[Station], cores: Sequence[Resource]
    ) -> "Ring":
        """Build concurrent rings of GPUs over direct links in a host, or over parallel adapters.

        GPUs without direct links or rails (such adapters) form a single ring in the given order, as
        do CPU devices.
        """
        if not all(isinstance(one, Device) and one.kind is DeviceKind.GPU for one in stations):
            return cls.over(machine, stations, cores)
        peers = machine.peers(stations)
        # Not if a station stands for several ranks: rings of direct links would have only one.
        orders = rings_at_once(machine, stations) if peers.num_ranks == len(stations) else []
        if orders:
            routes = tuple(machine.route(*pair) for order in orders for pair in neighbours(order))
            load = {hop: times / len(orders) for hop, times in _times(routes).items()}
        else:
            routes = tuple(_of_gpus(machine, *pair) for pair in neighbours(peers.stations))
            load = {hop: times / hop.link.rails for hop, times in _times(routes).items()}
        return cls(peers.num_ranks, routes, load, _held(stations), tuple(cores))

    def reduction(self, nbytes: float) -> Transfer:
        """Return the resources and cost of an all-reduce of `nbytes`; its slowest route counts."""
        n = self.num_ranks
        hops = self._by_pace[max(self._by_pace, key=lambda pace: self._seconds_at(pace, nbytes))]
        slowest = max(hops, key=self._seconds_per_byte)
        on = lanes_of(hops) + self.held + (self.cores if slowest.link.uses_cores else ())
        # Cost models assume that routes share no hops. So instead of `sent` they get `alone`, the
        # bytes that would take the same time on a route without shared hops.
        narrowest = min(hop.link.bandwidth_bytes_per_s for hop in hops)
        sent = 2 * (n - 1) / n * nbytes
        alone = sent * self.load[slowest] * (narrowest / slowest.link.bandwidth_bytes_per_s)
        return Transfer(on, Cost(nbytes=alone, num_calls=2 * (n - 1)))

    def gathering(self, nbytes: float) -> Transfer:
        """Return the resources and cost of an all-gather of `nbytes` from every rank.

        The cost is half that of an all-reduce of n * `nbytes`: each rank sends (n - 1) * `nbytes`
        in n - 1 messages.
        """
        on, both_ways = self.reduction(self.num_ranks * nbytes)
        return Transfer(on, Cost(nbytes=both_ways.nbytes / 2, num_calls=both_ways.num_calls // 2))

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of `nbytes`."""
        return max(self._seconds_at(pace, nbytes) for pace in self._by_pace)

    @cached_property
    def _by_pace(self) -> dict[_Pace, tuple[Hop, ...]]:
        """One route for each (latency, seconds per byte), because most routes are alike."""
        found: dict[_Pace, tuple[Hop, ...]] = {}
        for hops in self.routes:
            latency_s = sum(hop.link.latency_s for hop in hops)
            found.setdefault((latency_s, max(map(self._seconds_per_byte, hops))), hops)
        return found

    def _seconds_per_byte(self, hop: Hop) -> float:
        return self.load[hop] / hop.link.bandwidth_bytes_per_s

    def _seconds_at(self, pace: _Pace, nbytes: float) -> float:
        latency_s, seconds_per_byte = pace
        return 2 * (self.num_ranks - 1) * (latency_s + nbytes / self.num_ranks * seconds_per_byte)


def _times(routes: Iterable[tuple[Hop, ...]]) -> Counter[Hop]:
    """Count the routes over each hop."""
    return Counter(hop for route in routes for hop in route)


def _held(stations: Sequence[Station]) -> tuple[Resource, ...]:
    return tuple(exchange_lane(station.name) for station in stations)


def _of_gpus(machine: Machine, one: Station, other: Station) -> tuple[Hop, ...]:
    """Return the route between two GPUs, which with RDMA or rails bypasses their hosts.

    An RDMA adapter at the GPU's PCI Express switch bypasses the host, so GPUs of different hosts
    can exchange faster than GPUs of one host: at 12 GB/s instead of 8 GB/s (nccl issue 307), or at
    24 GB/s instead of 16 GB/s (nccl issue 412). With several rails (parallel adapters), each GPU's
    link carries only a part of the bytes.
    """
    route = machine.route(one, other)
    if not any(hop.link.rdma or hop.link.rails > 1 for hop in route):
        return route
    ends = {one.name, other.name}
    return tuple(hop for hop in route if not ends & {hop.source, hop.target})


def neighbours(stations: Sequence[Station]) -> list[tuple[Station, Station]]:
    """Return pairs of each station of a ring with the next station."""
    return list(zip(stations, (*stations[1:], stations[0]), strict=True))


UPDATE_TRAFFIC = 5  # memory traffic per parameter byte: momentum SGD reads three values, writes two


def rings(machine: Machine, hosts: Sequence[Host], devices: Sequence[Device]) -> tuple[Ring, ...]:
    """Return the rings between hosts: first within groups, then between groups, and so on.

    Without `machine.groups`, all hosts form one ring. `devices`: devices that wait for the
    exchange. Raises InvalidInput if hosts are not linked.
    """
    on_cores, held = tuple(core_lanes(devices)), _held(hosts) + waiting(devices)
    if machine.peers(hosts).num_ranks != prod(machine.groups):
        return (replace(Ring.over(machine, hosts, on_cores), held=held),)
    flows = ((size, *machine.flow(i)) for i, size in enumerate(machine.groups) if size > 1)
    return tuple(Ring(size, (route,), load, held, on_cores) for size, route, load in flows)


def waiting(devices: Sequence[Device]) -> tuple[Resource, ...]:
    """Return the resources that devices hold while they wait for their hosts' exchange."""
    return tuple(Resource(device.name, Lane.NETWORK) for device in devices)


@dataclass(frozen=True)
class Shares:
    """Exchange of a chunk of `nbytes` between hosts, by rings on each level of the network.

    First, each of the n hosts below one switch sums one nth part of the chunk. Each host then
    exchanges its part with the hosts of other groups that have summed the same part. On the way
    back, each host distributes its part within its group. With m groups of n hosts, a host sends
    these fractions of the bytes, first on the way out, then on the way back ("in"):

        out 0       out 1              in 1               in 0
        (n-1)/n     (m-1)/m of 1/n     (m-1)/m of 1/n     (n-1)/n

    `servers`: whether each host is a parameter server for its part on every level. Hosts then send
    parts to servers by direct, concurrent messages. The servers of the highest level update their
    part of the parameters, so the way back carries parameters instead of gradients. For a single
    host `levels` is empty, and only the update is planned. If only `num_servers` of n hosts are
    servers, each server receives n / `num_servers` times the bytes.
    """

    chunk: str
    nbytes: float
    levels: tuple[Ring, ...]
    hosts: Sequence[Host]
    servers: bool
    num_servers: int

    def tasks(self, step: int, summed: TaskId) -> Generator[Task, None, list[TaskId]]:
        """Yield the tasks that sum the chunk, let any servers update, and send the result back.

        Returns the last task, once per host.
        """
        before = summed
        for kind, part, on, cost in self._stages:
            task = Task(TaskId(step, kind, f"{self.chunk}.{part}"), on, cost, (before,))
            yield task
            before = task.id
        return [before] * len(self.hosts)

    @cached_property
    def _stages(self) -> list[tuple[Kind, str, tuple[Resource, ...], Cost]]:
        """The kind, name (such as "out0"), resources and cost of each task, in sequence."""
        memories = tuple(Resource(host.name, Lane.REDUCE) for host in self.hosts)
        there, back = [], []
        num_shares = 1
        # Each server gets this many times a host's share, because only `num_servers` hosts serve.
        busier = prod(ring.num_ranks for ring in self.levels) / self.num_servers
        for level, ring in enumerate(self.levels):
            nbytes = self.nbytes / num_shares
            on, both_ways = ring.reduction(nbytes)
            num_messages = 1 if self.servers else both_ways.num_calls // 2
            served = busier if self.servers else 1.0
            half = Cost(nbytes=served * both_ways.nbytes / 2, num_calls=num_messages)
            there.append((Kind.SEND, f"out{level}", on, half))
            back.append((Kind.SEND, f"in{level}", on, half))
            if self.servers:
                share = busier * nbytes / ring.num_ranks
                added = Cost(nbytes=(ring.num_ranks + 1) * share, num_calls=1)
                there.append((Kind.REDUCE, f"add{level}", memories, added))
            num_shares *= ring.num_ranks
        if self.servers:
            share = busier * self.nbytes / num_shares
            updated = Cost(nbytes=UPDATE_TRAFFIC * share, num_calls=1)
            there.append((Kind.REDUCE, "update", memories, updated))
        return there + back[::-1]
