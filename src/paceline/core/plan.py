"""Tasks and plans: what one window of training does, on what, and in which order."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple, Self, TypeVar

from paceline.core.workload import Cost

__all__ = ["COMMUNICATION", "COMPUTE", "Cost", "Kind", "Plan", "Resource", "Task", "task_name"]

_T = TypeVar("_T")


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
    return f"s{step}/{kind}{inside}{where}"


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

    What a scheduler asks for is numbers: `children` are those of the tasks that wait for each task,
    `num_parents` counts what it waits for itself, and `held` numbers the resources it holds.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._made = tuple(tasks)
        self._repeats = 0
        self._index: dict[str, int] = {}
        children: list[list[int] | tuple[()]] = []  # most tasks of a wide plan have none
        self.num_parents: list[int] = []
        for i, task in enumerate(self._made):
            for name in task.after:
                parent = self._parent(task, name)
                known = children[parent]
                if isinstance(known, list):
                    known.append(i)
                else:
                    children[parent] = [i]
            if not task.on:
                raise ValueError(f"{task.name}: a task has to run on something")
            if self._index.setdefault(task.name, i) != i:
                raise ValueError(f"{task.name}: the name stands twice")
            self.num_parents.append(len(task.after))
            children.append(())
        self.children: list[list[int] | tuple[()]] = children

    @classmethod
    def of_steps(cls, tasks: Callable[[int], Iterable[Task]], num_steps: int) -> Self:
        """Return the plan of steps of which each but the first does what the one before did.

        `tasks` gives the tasks of a step, which wait for none but their own and those of the step
        before. Only two steps are made; the others differ from the second in the number in their
        names. ValueError if the first two have other names.
        """
        plan = cls(task for step in range(min(num_steps, 2)) for task in tasks(step))
        if num_steps > 2:
            plan._repeat(num_steps - 2)
        return plan

    def _repeat(self, times: int) -> None:
        size, odd = divmod(len(self._made), 2)
        first, second = self._made[:size], self._made[size:]
        if odd or [_without_step(t.name) for t in first] != [_without_step(t.name) for t in second]:
            raise ValueError("steps that repeat have the same tasks in the same order")
        before = [[child - size for child in of if child >= size] for of in self.children[:size]]
        within = [[child - size for child in of] for of in self.children[size:]]
        pairs = zip(within, before, strict=True)
        both = [[*own, *(child + size for child in later)] for own, later in pairs]
        last = self.children[size:]
        self.children[size:] = [
            [child + start for child in of] if of else ()
            for start in range(size, (times + 1) * size, size)
            for of in both
        ]
        self.children += [[child + times * size for child in of] if of else () for of in last]
        self.num_parents += self.num_parents[size:] * times
        self._repeats = times

    def _repeated(self, column: Sequence[_T]) -> list[_T]:
        """Return what all tasks have, given what those have that were made."""
        second = list(column[len(column) // 2 :])
        return [*column, *(second * self._repeats)]

    def _parent(self, task: Task, name: str) -> int:
        try:
            return self._index[name]
        except KeyError:
            raise ValueError(f"{task.name}: waits for {name!r}, which is no earlier task") from None

    def __len__(self) -> int:
        return len(self.num_parents)

    def __getitem__(self, name: str) -> Task:
        return self.tasks[self.index[name]]

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in issue order."""
        second = self._made[len(self._made) // 2 :]
        later = (_at(task, step) for step in range(2, 2 + self._repeats) for task in second)
        return (*self._made, *later)

    @cached_property
    def index(self) -> dict[str, int]:
        """The place of each task by its name."""
        return {name: i for i, name in enumerate(self.columns[0])}

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """All resources, in the order of their first use."""
        sets = dict.fromkeys(task.on for task in self._made)
        return tuple(dict.fromkeys(resource for on in sets for resource in on))

    @cached_property
    def columns(self) -> tuple[Sequence[Any], ...]:
        """Names, kinds, resources and parts of all tasks: what a span takes over from its task."""
        names = [task.name for task in self._made]
        stems = [_without_step(name) for name in names[len(names) // 2 :]] if self._repeats else []
        later = [f"s{step}{stem}" for step in range(2, 2 + self._repeats) for stem in stems]
        rest = (list(map(attrgetter(field), self._made)) for field in ("kind", "on", "part"))
        return (names + later, *map(self._repeated, rest))

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
            for task in self._made
        ]
        first = dict(zip(reversed(sort_of), reversed(self._made), strict=True))
        return [first[sort] for sort in range(len(sorts))], self._repeated(sort_of)

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """For each task the indices into `resources` that it holds."""
        number = {resource: i for i, resource in enumerate(self.resources)}
        seen = {
            on: tuple(number[resource] for resource in on)
            for on in dict.fromkeys(task.on for task in self._made)
        }
        return self._repeated([seen[task.on] for task in self._made])


def _without_step(name: str) -> str:
    return name[name.index("/") :]


def _at(task: Task, step: int) -> Task:
    """Return a task of step 1 as it is in a later step."""
    own, before = f"s{step}", f"s{step - 1}"
    after = tuple((own if a.startswith("s1/") else before) + _without_step(a) for a in task.after)
    name = own + _without_step(task.name)
    return Task(name, task.kind, task.on, task.cost, after, task.part)
