"""The exchanges between child hubs and their parent in a plan, each after `gather` steps.

    workers   [grad 0][grad 1]                        [grad 0][grad 1] ...
    child             sum 0  sum 1         | copy             sum 0  sum 1
    to root                  [hubs_gradients]
    root                                    step
    to child                                [hubs_parameters]

A child hub adds the gradients of its workers' steps to a sum; the mean of `gather` steps goes to
the root, whose optimizer takes a step, and all parameters come back. One exchange of a child is on
its way at a time. Its workers go on meanwhile, until the next mean is complete too; with a
staleness of 0 they wait at once, and children wait for each other.
"""

from collections.abc import Iterator, Mapping

from paceline.core.cost import copy_lanes, update_cost
from paceline.core.machine import Device, Machine
from paceline.core.plan import Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.routes import DevicePlacement, RouteStage, stages
from paceline.strategies.wheel.split import MessageSize

GRADIENTS, PARAMETERS = "hubs_gradients", "hubs_parameters"
SUM, COPY = "sum", "copy"
_SUM_TRAFFIC, _COPY_TRAFFIC = 3, 2  # bytes for each byte: two are read and one is written; one each


class _Child:
    """A child hub: its device, its routes to the root and back, and how far its steps are."""

    def __init__(self, machine: Machine, own: Device, root: Device, whole: MessageSize) -> None:
        def way(source: Device, target: Device, lane: Lane) -> tuple[RouteStage, ...]:
            return stages(machine, source, target, Resource(own.name, lane), whole)

        self.device = own
        self.up, self.down = way(own, root, Lane.UPLOAD), way(root, own, Lane.DOWNLOAD)
        self.num_summed = 0
        self.copied: list[TaskId] = []  # after each exchange, the child's parameters


class HubExchanges:
    """The tasks by which steps of workers become updates of the root.

    An exchange has the step and the worker of the step that completed its mean.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        config: Wheel,
        placement: DevicePlacement,
        computing: Mapping[str, tuple[Resource, ...]],
    ) -> None:
        nbytes = workload.gradient_nbytes
        whole = MessageSize(workload.num_parameters, nbytes, None)
        heads = dict.fromkeys(placement.heads)
        children = {one: _Child(machine, one, placement.hub, whole) for one in heads}
        self._of_worker = [children[one] for one in placement.heads]
        self._on_root, self._gather = computing[placement.hub.name], config.gathered
        self._waits = config.staleness == 0
        # Children that wait for each other do so step by step, if means are of whole steps.
        self.in_step = self._waits and config.gathered % config.workers_of_hub == 0
        self._exchanged: set[TaskId] = set()
        self._sum = Cost(nbytes=_SUM_TRAFFIC * nbytes, num_calls=1)
        self._copy = Cost(nbytes=_COPY_TRAFFIC * nbytes, num_calls=1)
        self._update = update_cost(workload)

    def summed(self, step: int, worker: int) -> TaskId:
        """Return the task after which a worker's step is in its hub's sum."""
        return TaskId(step, Kind.REDUCE, SUM, worker)

    def add(self, step: int, worker: int, halves: tuple[TaskId, ...]) -> Iterator[Task]:
        """Yield the sum, and if it is complete then, what sends its mean and updates the root."""
        child, own = self._of_worker[worker], self.summed(step, worker)
        yield Task(own, copy_lanes(child.device), self._sum, halves)
        child.num_summed += 1
        if child.num_summed % self._gather == 0:
            yield from _sent(child.up, step, GRADIENTS, worker, (own, *child.copied[-1:]))
            arrived = TaskId(step, child.up[-1].kind, GRADIENTS, worker)
            own = TaskId(step, Kind.STEP, "", worker)
            yield Task(own, self._on_root, self._update, (arrived,))
            child.copied.append(self._copied(step, worker))
            self._exchanged.add(self._copied(step, worker))

    def _copied(self, step: int, worker: int) -> TaskId:
        return TaskId(step, Kind.REDUCE, COPY, worker)

    def sends(self, step: int, worker: int) -> bool:
        """Return True if a worker's step, which was added, completed a mean."""
        return self._copied(step, worker) in self._exchanged

    def reply(self, step: int, worker: int, updated: tuple[TaskId, ...]) -> Iterator[Task]:
        """Yield the way back of an exchange, if it is one, after these updates of the root."""
        if not self.sends(step, worker):
            return
        child, copied = self._of_worker[worker], self._copied(step, worker)
        yield from _sent(child.down, step, PARAMETERS, worker, updated)
        arrived = TaskId(step, child.down[-1].kind, PARAMETERS, worker)
        yield Task(copied, copy_lanes(child.device), self._copy, (arrived,))

    def before_fetch(self, worker: int) -> tuple[TaskId, ...]:
        """Return what a worker's next fetch waits for: the reply that its hub cannot go on without.

        Of the exchange before the sum that is full; with a staleness of 0 of the last one.
        """
        child = self._of_worker[worker]
        number = child.num_summed // self._gather - (1 if self._waits else 2)
        return (child.copied[number],) if number >= 0 else ()


def _sent(
    way: tuple[RouteStage, ...], step: int, part: str, worker: int, after: tuple[TaskId, ...]
) -> Iterator[Task]:
    """Yield the stages of a message between hubs, which follow one another."""
    for kind, on, cost in way:
        own = TaskId(step, kind, part, worker)
        yield Task(own, on, cost, after)
        after = (own,)
