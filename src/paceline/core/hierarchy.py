"""Exchanges between hosts that go group by group: those below one switch first, then larger ones.

Hosts of a group share what they sum: each of n ends with an nth part, summed over the group. It
takes that part to the next larger groups, where its like in each other group has the same part. On
the way back each hands out what it has.

    host, groups of n, then m     out 0              out 1                in 1               in 0
    bytes that a host sends       (n-1)/n            (m-1)/m of 1/n       (m-1)/m of 1/n     (n-1)/n
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from paceline.core.cost import exchange_lane, reduce_lane
from paceline.core.host_step import cores
from paceline.core.machine import Device, Host, Machine
from paceline.core.plan import Cost, Kind, Resource, Task, task_name
from paceline.core.transfer import Ring, Transfer

UPDATE_TRAFFIC = 5  # bytes for each byte updated: momentum SGD reads three values and writes two


def rings(machine: Machine, hosts: Sequence[Host], devices: Sequence[Device]) -> tuple[Ring, ...]:
    """Return the rings that the hosts form in groups of each level, the smallest groups first.

    Hosts that fill no equal groups form one ring. `devices` are theirs, which wait for what their
    hosts exchange. InvalidInput if hosts are not linked.
    """
    on_cores = tuple(cores(devices))
    held = tuple(exchange_lane(host.name) for host in hosts)
    held += tuple(Resource(device.name, "network") for device in devices)
    if machine.peers(hosts).num_ranks != prod(machine.groups):
        return (replace(Ring.over(machine, hosts, on_cores), held=held),)
    flows = [(size, machine.flow(i)) for i, size in enumerate(machine.groups) if size > 1]
    return tuple(Ring(size, (flow.route,), flow.load, held, on_cores) for size, flow in flows)


@dataclass(frozen=True)
class Shares:
    """The exchange of a chunk of `nbytes` between hosts, through rings level by level.

    With `servers` each host is a parameter server of its share on every level: shares go to their
    servers, and come back from them, by direct messages, all at once; servers add them, and those
    of the highest level update their share of the parameters, which comes back in place of
    gradients.
    """

    chunk: str
    nbytes: float
    levels: tuple[Ring, ...]
    memories: tuple[Resource, ...]
    servers: bool

    @classmethod
    def over(
        cls, levels: tuple[Ring, ...], hosts: Sequence[Host], chunk: str, nbytes: int, servers: bool
    ) -> "Shares":
        """Return the exchange between the hosts; without levels, of one host with itself."""
        memories = tuple(reduce_lane(host.name) for host in hosts)
        return cls(chunk, nbytes, levels, memories, servers)

    def tasks(self, step: int, summed: str) -> Iterator[Task]:
        """Yield the way out, the update if servers make it, and the way back."""
        before = summed
        for task in (*self._way(step, "out"), *self._update(step), *self._way(step, "in")):
            yield Task(task.name, task.kind, task.on, task.cost, (before,), task.part)
            before = task.name

    def result(self, step: int, place: int) -> str:
        """Return the name of the last task, after which all hosts have the result."""
        if self.levels:
            return task_name(step, Kind.SEND, f"{self.chunk}.in0")
        return task_name(step, Kind.REDUCE, f"{self.chunk}.update")

    def _way(self, step: int, direction: str) -> Iterator[Task]:
        numbers = range(len(self.levels))
        for level in numbers if direction == "out" else reversed(numbers):
            ring, nbytes = self.levels[level], self._nbytes(level)
            part = f"{self.chunk}.{direction}{level}"
            on, cost = self._half(ring, nbytes)
            yield Task(task_name(step, Kind.SEND, part), Kind.SEND, on, cost, part=part)
            if self.servers and direction == "out":
                added = (ring.num_ranks + 1) * nbytes / ring.num_ranks
                yield self._in_memory(step, f"{self.chunk}.add{level}", added)

    def _update(self, step: int) -> Iterator[Task]:
        if self.servers:
            traffic = UPDATE_TRAFFIC * self._nbytes(len(self.levels))
            yield self._in_memory(step, f"{self.chunk}.update", traffic)

    def _in_memory(self, step: int, part: str, traffic: float) -> Task:
        cost = Cost(nbytes=traffic, num_calls=1)
        return Task(task_name(step, Kind.REDUCE, part), Kind.REDUCE, self.memories, cost, part=part)

    def _nbytes(self, level: int) -> float:
        """Return the bytes of what hosts share on a level: that of one share of the level below."""
        return self.nbytes / prod(ring.num_ranks for ring in self.levels[:level])

    def _half(self, ring: Ring, nbytes: float) -> Transfer:
        """Return the way out, or back: half of an all-reduce."""
        on, both = ring.reduction(nbytes)
        num_messages = 1 if self.servers else both.num_calls // 2
        return Transfer(on, Cost(nbytes=both.nbytes / 2, num_calls=num_messages))
