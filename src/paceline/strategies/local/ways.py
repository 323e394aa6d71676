"""The ways of fragments to the hub and back, as stages that follow one another in a plan."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core import cost as costs
from paceline.core.machine import Device, Host, Machine
from paceline.core.plan import Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.transfer import Transfer, handling, lanes_of, message_lanes, message_tasks


class Stage(NamedTuple):
    """A part of what is done with a fragment on its way to the hub, or back.

    `handled` is what the cores of two hosts do meanwhile.
    """

    kind: Kind
    part: str
    on: tuple[Resource, ...]
    cost: Cost
    handled: tuple[Transfer, ...] = ()


@dataclass(frozen=True)
class Ways:
    """The ways of payloads between the workers' devices and the hub's host."""

    machine: Machine
    hub: Host

    def up(self, part: str, device: Device, nbytes: int) -> Stage:
        """Return the way of so many bytes from a worker to the hub."""
        return self._sent(f"{part}.up", device, nbytes, is_up=True)

    def down(self, part: str, device: Device, nbytes: int) -> Stage:
        """Return the way of so many bytes from the hub to a worker."""
        return self._sent(f"{part}.down", device, nbytes, is_up=False)

    def _sent(self, part: str, device: Device, nbytes: int, *, is_up: bool) -> Stage:
        handled = handling(self.machine.host_of(device), self.hub, nbytes)
        return Stage(Kind.SEND, part, *self._between(device, nbytes, is_up=is_up), handled)

    def _between(self, device: Device, nbytes: int, *, is_up: bool) -> Transfer:
        machine, hub = self.machine, self.hub
        lane = Resource(device.name, Lane.UPLOAD if is_up else Lane.DOWNLOAD)
        own = machine.host_of(device)
        if own == hub and hub.name not in machine.network.within:
            # Through the memory of the host they share: each byte is read and written.
            on = (Resource(hub.name, Lane.REDUCE), lane, *costs.lone_core(hub))
            return Transfer(on, Cost(nbytes=2 * nbytes, num_calls=1))
        route = machine.route(own, hub) if is_up else machine.route(hub, own)
        on = (*lanes_of(route), lane)
        if any(hop.link.uses_cores for hop in route):
            on += tuple(costs.core_lanes([device]))
        return Transfer((*on, *message_lanes(own, hub)), Cost(nbytes=nbytes, num_calls=1))


def following(
    number: int, worker: int | None, stages: Sequence[Stage], after: tuple[TaskId, ...]
) -> Generator[Task, None, tuple[TaskId, ...]]:
    """Yield the tasks of stages that follow one another, the first after these; return the last."""
    for kind, part, on, cost, handled in stages:
        own = TaskId(number, kind, part, worker)
        tasks = message_tasks(own, (Transfer(on, cost), *handled), after)
        yield from tasks
        after = tuple(task.id for task in tasks)
    return after
