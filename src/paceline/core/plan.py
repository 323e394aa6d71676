"""Tasks and plans: what one window of training does, on what, and in which order."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

from paceline.core.workload import Cost

__all__ = ["COMMUNICATION", "COMPUTE", "Cost", "Kind", "Plan", "Resource", "Task", "task_name"]


class Kind(StrEnum):
    """What a task does."""

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    ENCODE = "encode"
    DECODE = "decode"
    D2H = "d2h"
    H2D = "h2d"
    SEND = "send"
    REDUCE = "reduce"
    STEP = "step"


COMPUTE = frozenset({Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.STEP})
COMMUNICATION = frozenset(Kind) - COMPUTE


class Resource(NamedTuple):
    """One thing that does one task at a time: a lane of a device, or a direction of a link."""

    owner: str
    lane: str

    def __str__(self) -> str:
        return f"{self.owner}/{self.lane}"


def task_name(step: int, kind: Kind, part: str = "", worker: int | None = None) -> str:
    """Return the stable name that a task has in the plan and its span has in every recording.

    A task without a worker is a collective: all ranks record it under the one name.
    """
    inside = f"[{part}]" if part else ""
    where = "" if worker is None else f"@worker{worker}"
    return f"s{step}/{kind.value}{inside}{where}"


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work that holds all of `on` while it runs, and starts when all `after` ended.

    `part` is the layer, bucket or chunk that it works on; measured prices are looked up by it.
    """

    name: str
    kind: Kind
    on: tuple[Resource, ...]
    cost: Cost = field(default_factory=Cost)
    after: tuple[str, ...] = ()
    part: str = ""


class Plan:
    """A validated tuple of tasks, in issue order.

    Tasks may only wait for earlier ones, so that a plan is acyclic by construction. Raises
    ValueError for a name that stands twice, an unknown or later name in `after`, and a task on
    nothing.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks = tuple(tasks)
        self.index: dict[str, int] = {}
        children: list[list[int] | tuple[()]] = []  # most tasks of a wide plan have none
        self.num_parents: list[int] = []
        for i, task in enumerate(self.tasks):
            for name in task.after:
                parent = self._parent(task, name)
                known = children[parent]
                if isinstance(known, list):
                    known.append(i)
                else:
                    children[parent] = [i]
            if not task.on:
                raise ValueError(f"{task.name}: a task has to run on something")
            if self.index.setdefault(task.name, i) != i:
                raise ValueError(f"{task.name}: the name stands twice")
            self.num_parents.append(len(task.after))
            children.append(())
        self.children = children

    def _parent(self, task: Task, name: str) -> int:
        try:
            return self.index[name]
        except KeyError:
            raise ValueError(f"{task.name}: waits for {name!r}, which is no earlier task") from None

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, name: str) -> Task:
        return self.tasks[self.index[name]]

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """All resources, in the order of their first use."""
        sets = dict.fromkeys(task.on for task in self.tasks)
        return tuple(dict.fromkeys(resource for on in sets for resource in on))

    @cached_property
    def columns(self) -> tuple[tuple[object, ...], ...]:
        """Names, kinds, resources and parts of all tasks: what a span takes over from its task."""
        fields = ("name", "kind", "on", "part")
        return tuple(tuple(map(attrgetter(field), self.tasks)) for field in fields)

    @cached_property
    def priced_alike(self) -> tuple[list[Task], list[int]]:
        """One task of each sort, and for each task the index of its sort.

        No cost model can tell two tasks of a sort apart. A window repeats its steps, so that there
        are few sorts to price, however long it is.
        """
        sorts: dict[tuple[object, ...], int] = {}
        # A cost is told by its identity: steps share their layers' costs, and hashing one in Python
        # takes longer than scheduling a task.
        number = sorts.setdefault
        sort_of = [
            number((task.kind, task.part, task.on, id(task.cost)), len(sorts))
            for task in self.tasks
        ]
        first = dict(zip(reversed(sort_of), reversed(self.tasks), strict=True))
        return [first[sort] for sort in range(len(sorts))], sort_of

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """For each task the indices into `resources` that it holds."""
        number = {resource: i for i, resource in enumerate(self.resources)}
        seen = {
            on: tuple(number[resource] for resource in on)
            for on in dict.fromkeys(task.on for task in self.tasks)
        }
        return [seen[task.on] for task in self.tasks]
