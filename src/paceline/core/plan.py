"""Tasks and plans: the work of some consecutive steps, with its resources and order."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cached_property
from itertools import chain, count
from typing import NamedTuple, Self

from paceline.core.workload import Cost as Cost


class Kind(StrEnum):
    """The kind of a task's work.

    A `TRAIN` task is several local steps of a worker: load, forward, backward and update.
    """

    LOAD = "load"
    FORWARD = "forward"
    BACKWARD = "backward"
    TRAIN = "train"
    ENCODE = "encode"
    DECODE = "decode"
    D2H = "d2h"
    H2D = "h2d"
    SEND = "send"
    REDUCE = "reduce"
    STEP = "step"

    # Enum's hash is a Python function, and tasks are looked up millions of times.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.TRAIN, Kind.STEP})
COMMUNICATION = frozenset(Kind) - COMPUTE
# Value of `Task.part` for the forward and backward of all micro-batches except the last.
ACCUMULATED = "earlier micro-batches"


class Lane(StrEnum):
    """A part of a device, host or link that executes one task at a time."""

    COMPUTE = "compute"
    CORE = "core"  # a core that CPU devices share, if they outnumber their host's cores
    MEMORY = "memory"  # held while a CPU device copies or adds in memory
    EXCHANGE = "exchange"
    UPLOAD = "upload"  # to a parameter server
    DOWNLOAD = "download"
    D2H = "d2h"  # copy engines of a GPU
    H2D = "h2d"
    REDUCE = "reduce"  # sums in a host's memory
    NETWORK = "network"  # held while a device waits for its host's exchange
    WIRE = "wire"  # one direction of a link
    MESSAGES = "messages"  # held while a host encrypts, checks and copies messages
    ISSUE = "issue"  # the thread that launches kernels
    ENCODE_EIGHTBIT = "encode eightbit"
    DECODE_EIGHTBIT = "decode eightbit"
    ENCODE_FOURBIT = "encode fourbit"
    DECODE_FOURBIT = "decode fourbit"
    ENCODE_CAST = "encode cast"
    DECODE_CAST = "decode cast"
    ENCODE_ONEBIT = "encode onebit"
    DECODE_ONEBIT = "decode onebit"
    ENCODE_THRESHOLD = "encode threshold"
    DECODE_THRESHOLD = "decode threshold"

    __hash__ = str.__hash__  # faster than Enum's hash, a Python function


class Resource(NamedTuple):
    """A lane, and the name of its `owner`: a device, host or link."""

    owner: str
    lane: Lane

    def __str__(self) -> str:
        return f"{self.owner}/{self.lane}"


class TaskId(NamedTuple):
    """Identity of a task, equal in the plan and in recordings.

    `worker` is None for a collective, for which all ranks record the same identity. `part`: layer,
    bucket, chunk or message. `sub_batch`: for a model-parallel layer, the number of its sub-batch.
    """

    step: int
    kind: Kind
    part: str = ""
    worker: int | None = None
    sub_batch: int | None = None

    @property
    def name(self) -> str:
        """The identity as text, such as "s0/d2h[3]@worker0"."""
        number = "" if self.sub_batch is None else f"/{self.sub_batch}"
        inside = f"[{self.part}{number}]" if self.part or number else ""
        where = "" if self.worker is None else f"@worker{self.worker}"
        return f"s{self.step}/{self.kind}{inside}{where}"


class PriceKey(NamedTuple):
    """Identifies a task's measured duration; `owner`: owner of the task's first resource."""

    owner: str
    kind: Kind
    part: str = ""
    sub_batch: int | None = None


class Task(NamedTuple):
    """Work that holds the resources `on`, and starts when the tasks `after` have ended.

    `num_samples`: samples of a batch in strategy `hogbatch`; 0 in other strategies. To save memory,
    `after` refers to the `id` objects of earlier tasks, not to copies of them.
    """

    id: TaskId
    on: tuple[Resource, ...]
    cost: Cost = Cost()
    after: tuple[TaskId, ...] = ()
    num_samples: int = 0

    @property
    def kind(self) -> Kind:
        """The kind of work."""
        return self.id.kind

    @property
    def part(self) -> str:
        """The layer, bucket, chunk or message on which the task works."""
        return self.id.part

    @property
    def name(self) -> str:
        """The identity as text."""
        return self.id.name

    @property
    def price_key(self) -> PriceKey:
        """The key of the task's measured duration."""
        return PriceKey(self.on[0].owner, self.kind, self.part, self.id.sub_batch)


class Plan:
    """A validated sequence of tasks, in the order in which they are issued.

    A task may only wait for earlier tasks, so a plan has no cycles. Raises ValueError if two tasks
    have the same identity, if a task waits for an unknown or later task, and if a task holds no
    resources.

    The scheduler reads three lists. `children[i]`: indices of the tasks that wait for task i.
    `num_parents[i]`: number of tasks for which task i waits. `held[i]`: indices of the resources
    that task i holds.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        with without_collection():
            self.tasks = tuple(tasks)
            self._link()

    def _link(self) -> None:
        """Check the tasks, and fill `children` and `num_parents`."""
        place: dict[TaskId, int] = {}
        # Most tasks have at most one child, stored as a tuple, which is smaller than a list.
        self.children: list[list[int] | tuple[int, ...]] = []
        self.num_parents: list[int] = []
        last = None
        for i, (own, on, _, after, _) in enumerate(self.tasks):
            for before in after:
                # Most tasks wait for the previous task; this comparison saves the hash lookup.
                parent = i - 1 if before is last else place.get(before)
                if parent is None:
                    problem = f"waits for {before.name!r}, which is not an earlier task"
                    raise ValueError(f"{own.name}: {problem}")
                known = self.children[parent]
                if isinstance(known, list):
                    known.append(i)
                else:
                    self.children[parent] = [*known, i] if known else (i,)
            if not on:
                raise ValueError(f"{own.name}: needs a resource")
            if place.setdefault(own, i) != i:
                raise ValueError(f"{own.name}: is in the plan twice")
            self.num_parents.append(len(after))
            self.children.append(())
            last = own

    @classmethod
    def of_steps(cls, tasks: Callable[[int], Iterable[Task]], num_steps: int) -> Self:
        """Return the plan of `num_steps` steps; `tasks(step)` returns the tasks of a step."""
        return cls(chain.from_iterable(map(tasks, range(num_steps))))

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, name: str) -> Task:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Task]:
        return {task.name: task for task in self.tasks}

    @cached_property
    def priced_alike(self) -> tuple[list[Task], list[int]]:
        """One task per group of equal predicted seconds, and the group number of every task.

        Tasks of a group differ only in step, worker and predecessors, on which predictions do not
        depend. Steps repeat, so even a long plan has few groups.
        """
        numbers: dict[tuple[object, ...], int] = defaultdict(count().__next__)
        # Compare costs by identity: all steps refer to the same `Cost` objects, and hashing a cost
        # is slower than scheduling a task.
        sort_of = [
            numbers[kind, part, sub_batch, on, id(cost), num_samples]
            for (_, kind, part, _, sub_batch), on, cost, _, num_samples in self.tasks
        ]
        first = dict(zip(reversed(sort_of), reversed(self.tasks), strict=True))
        return [first[sort] for sort in range(len(first))], sort_of

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """All resources in order of first use."""
        sorts, _ = self.priced_alike
        return tuple(dict.fromkeys(resource for task in sorts for resource in task.on))

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """For each task, the indices of its resources in `resources`."""
        sorts, sort_of = self.priced_alike
        number = {resource: i for i, resource in enumerate(self.resources)}
        of_sort = [tuple(number[resource] for resource in task.on) for task in sorts]
        return [of_sort[sort] for sort in sort_of]


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector, which takes two thirds of the time to build a plan.

    Tasks form no reference cycles, but the collector scans all of them repeatedly.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
