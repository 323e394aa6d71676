"""Plan the exchanges of gradients and parameters between child hubs and the root hub.

    workers   [grad 0][grad 1]                        [grad 0][grad 1] ...
    child             sum 0  sum 1         | copy             sum 0  sum 1
    to root                  [hubs_gradients]
    root                                    step
    to child                                [hubs_parameters]

A child hub sums its workers' gradients. After `gather` steps of workers, the child hub sends the
mean gradients to the root. The root's optimizer takes a step, and the root replies with all
parameters, which the child hub copies into its model. A child hub has one such exchange at a time.
During an exchange, its workers continue until the next mean is complete. With `staleness=0`,
workers wait for the end of each exchange, and all child hubs wait for the slowest child hub.
"""

from collections.abc import Iterator

from paceline.core.cost import copy_lanes, lone_core, update_cost
from paceline.core.machine import Device, Machine, Station
from paceline.core.plan import Cost, Kind, Lane, Resource, Task, TaskId
from paceline.core.workload import Workload
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.routes import (
    DevicePlacement,
    Message,
    server_of,
    stages,
    updating_on,
)
from paceline.strategies.wheel.split import MessageSize

GRADIENTS, PARAMETERS = "hubs_gradients", "hubs_parameters"
SUM, COPY = "sum", "copy"
# Bytes read and written per byte of gradients: a sum reads two bytes and writes one, a copy reads
# one byte and writes one.
_SUM_TRAFFIC, _COPY_TRAFFIC = 3, 2


class _Child:
    """A child hub in a plan: its routes to the root and back, and its progress."""

    def __init__(
        self, machine: Machine, own: Device, server: Station, root: Station, whole: MessageSize
    ) -> None:
        lanes = (*copy_lanes(own), *lone_core(machine.host_of(own)))
        self.copying = updating_on(server, lanes)
        self.up = stages(machine, server, root, Resource(own.name, Lane.UPLOAD), whole)
        self.down = stages(machine, root, server, Resource(own.name, Lane.DOWNLOAD), whole)
        self.num_summed = 0
        self.copied: list[TaskId] = []  # the last task of each exchange


class HubExchanges:
    """Plans the tasks of child hubs: sums of gradients, and exchanges with the root.

    A task of an exchange has an id with the step and the worker whose gradients completed the mean.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        config: Wheel,
        placement: DevicePlacement,
        on_root: tuple[Resource, ...],
    ) -> None:
        nbytes = workload.gradient_nbytes
        whole = MessageSize(workload.num_parameters, nbytes, None)
        heads = dict.fromkeys(placement.heads)
        root = server_of(machine, placement.hub, config)
        children = {
            one: _Child(machine, one, server_of(machine, one, config), root, whole) for one in heads
        }
        self._of_worker = [children[one] for one in placement.heads]
        self._on_root, self._gather = on_root, config.gathered
        self._unanswered: list[tuple[int, int]] = []  # steps and workers of means without replies
        self._waits = config.staleness == 0
        # Whether the root waits for all child hubs: only if every mean is complete at a step's end.
        self.in_step = self._waits and config.gathered % config.workers_of_hub == 0
        self._sum = Cost(nbytes=_SUM_TRAFFIC * nbytes, num_calls=1)
        self._copy = Cost(nbytes=_COPY_TRAFFIC * nbytes, num_calls=1)
        self._update = update_cost(workload)

    def summed(self, step: int, worker: int) -> TaskId:
        """Return the task that adds a worker's gradients of a step to its hub's sum."""
        return TaskId(step, Kind.REDUCE, SUM, worker)

    def add(self, step: int, worker: int, halves: tuple[TaskId, ...]) -> Iterator[Task]:
        """Yield the task that adds a worker's gradients to its hub's sum.

        If the sum is then complete, also yields the message to the root and the root's update.
        `halves`: the tasks after which the child hub has the gradients of body and head.
        """
        child, own = self._of_worker[worker], self.summed(step, worker)
        yield Task(own, child.copying, self._sum, halves)
        child.num_summed += 1
        if child.num_summed % self._gather == 0:
            mean = Message(child.up, step, GRADIENTS, worker)
            arrived = yield from mean.tasks((own, *child.copied[-1:]))
            own = TaskId(step, Kind.STEP, "", worker)
            yield Task(own, self._on_root, self._update, arrived)
            child.copied.append(TaskId(step, Kind.REDUCE, COPY, worker))
            self._unanswered.append((step, worker))

    def replies(self) -> Iterator[Task]:
        """Yield the root's replies to all means since the last call.

        The root first makes the updates with all of these means, and then sends all replies.
        """
        sent, self._unanswered = self._unanswered, []
        updates = tuple(TaskId(step, Kind.STEP, "", worker) for step, worker in sent)
        for step, worker in sent:
            child = self._of_worker[worker]
            arrived = yield from Message(child.down, step, PARAMETERS, worker).tasks(updates)
            yield Task(TaskId(step, Kind.REDUCE, COPY, worker), child.copying, self._copy, arrived)

    def before_fetch(self, worker: int) -> tuple[TaskId, ...]:
        """Return the last task of the exchange for which a worker's next fetch must wait.

        With `staleness=0`, the fetch waits for the latest exchange, otherwise for the one before,
        if any.
        """
        child = self._of_worker[worker]
        number = child.num_summed // self._gather - (1 if self._waits else 2)
        return (child.copied[number],) if number >= 0 else ()
