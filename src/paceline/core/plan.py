"""Tasks and plans: what one window of training does, on which resources, and in which order."""

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
    """The kind of work that a task does.

    `TRAIN` are steps that a worker takes by itself: load, forward, backward and update together.
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

    # That of enum is a Python function: tasks are found by kinds and lanes millions of times.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.TRAIN, Kind.STEP})
COMMUNICATION = frozenset(Kind) - COMPUTE
# The part of a forward that is the forward and backward of all micro-batches before the last one.
ACCUMULATED = "earlier micro-batches"


class Lane(StrEnum):
    """A part of a device, host or link that does one task at a time."""

    COMPUTE = "compute"
    CORE = "core"  # of a host that has fewer than devices that compute on them
    MEMORY = "memory"  # of a CPU device, held while it copies or adds
    EXCHANGE = "exchange"
    UPLOAD = "upload"  # to a parameter server
    DOWNLOAD = "download"
    D2H = "d2h"  # copy engines of a GPU
    H2D = "h2d"
    REDUCE = "reduce"  # sums in a host's memory
    NETWORK = "network"  # of a device that waits for what its host exchanges
    WIRE = "wire"  # one direction of a link
    MESSAGES = "messages"  # of a host: what its cores do to send and receive a hub's
    ISSUE = "issue"  # the thread that issues kernels
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

    __hash__ = str.__hash__  # as of kinds


class Resource(NamedTuple):
    """A lane of a device, host or link; `owner` is its name."""

    owner: str
    lane: Lane

    def __str__(self) -> str:
        return f"{self.owner}/{self.lane}"


class TaskId(NamedTuple):
    """The identity of a task: the same in the plan and in every recording.

    `worker` is None for a collective, which all ranks record under one identity. `part` is the
    layer, bucket, chunk or message; `sub_batch` the number of the sub-batch of a split layer.
    """

    step: int
    kind: Kind
    part: str = ""
    worker: int | None = None
    sub_batch: int | None = None

    @property
    def name(self) -> str:
        """The identity as people read it, such as "s0/d2h[3]@worker0"."""
        number = "" if self.sub_batch is None else f"/{self.sub_batch}"
        inside = f"[{self.part}{number}]" if self.part or number else ""
        where = "" if self.worker is None else f"@worker{self.worker}"
        return f"s{self.step}/{self.kind}{inside}{where}"


class PriceKey(NamedTuple):
    """The key of a measured duration: the owner of a task's first resource, and the work."""

    owner: str
    kind: Kind
    part: str = ""
    sub_batch: int | None = None


class Task(NamedTuple):
    """A piece of work that holds all of `on` while it runs, and starts when all `after` ended.

    Its kind, step, part, worker and sub-batch are fields of its identity, which the tasks that wait
    for it hold, too: a wide plan has millions. `num_samples` is the size of an asynchronous
    worker's batch; 0 where the plan does not say.
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
    def step(self) -> int:
        """The step that it belongs to."""
        return self.id.step

    @property
    def part(self) -> str:
        """The layer, bucket, chunk or message that it works on."""
        return self.id.part

    @property
    def worker(self) -> int | None:
        """The worker, or None for a collective."""
        return self.id.worker

    @property
    def sub_batch(self) -> int | None:
        """The number of the sub-batch, if it works on one."""
        return self.id.sub_batch

    @property
    def name(self) -> str:
        """The identity as people read it."""
        return self.id.name

    @property
    def price_key(self) -> PriceKey:
        """The key of its measured duration."""
        return PriceKey(self.on[0].owner, self.id.kind, self.id.part, self.id.sub_batch)


class Plan:
    """A validated tuple of tasks, in issue order.

    Tasks may only wait for earlier ones, so that a plan is acyclic by construction. Raises
    ValueError for an identity that stands twice, an unknown or later one in `after`, and a task on
    nothing.

    The scheduler works on integer arrays: `children` are the places of the tasks that wait for each
    task, `num_parents` counts what it waits for itself, `held` numbers the resources it holds.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        with without_collection():
            self.tasks = tuple(tasks)
            self._link()

    def _link(self) -> None:
        """Check the tasks, and number what each waits for."""
        place: dict[TaskId, int] = {}
        # Most tasks of a wide plan have one child or none: a tuple of those is smaller than a list.
        self.children: list[list[int] | tuple[int, ...]] = []
        self.num_parents: list[int] = []
        last = None
        for i, (own, on, _, after, _) in enumerate(self.tasks):
            for before in after:
                # Most tasks wait for the last one, whose identity need not be hashed for it.
                parent = i - 1 if before is last else place.get(before)
                if parent is None:
                    raise ValueError(
                        f"{own.name}: waits for {before.name!r}, which is no earlier task"
                    )
                known = self.children[parent]
                if isinstance(known, list):
                    known.append(i)
                else:
                    self.children[parent] = [*known, i] if known else (i,)
            if not on:
                raise ValueError(f"{own.name}: a task has to run on something")
            if place.setdefault(own, i) != i:
                raise ValueError(f"{own.name}: duplicate task")
            self.num_parents.append(len(after))
            self.children.append(())
            last = own

    @classmethod
    def of_steps(cls, tasks: Callable[[int], Iterable[Task]], num_steps: int) -> Self:
        """Return the plan of so many steps, whose tasks are given by a step's number."""
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
        """One task of each sort, and for each task the index of its sort.

        No cost model can tell two tasks of a sort apart. A window repeats its steps, so that there
        are few sorts, however long it is: all but a task's step and worker is looked up by sort.
        """
        numbers: dict[tuple[object, ...], int] = defaultdict(count().__next__)
        # A cost is told by its identity: steps share their layers' costs, and hashing one in Python
        # takes longer than scheduling a task.
        sort_of = [
            numbers[kind, part, sub_batch, on, id(cost), num_samples]
            for (_, kind, part, _, sub_batch), on, cost, _, num_samples in self.tasks
        ]
        first = dict(zip(reversed(sort_of), reversed(self.tasks), strict=True))
        return [first[sort] for sort in range(len(first))], sort_of

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """All resources, in the order of their first use."""
        sorts, _ = self.priced_alike
        return tuple(dict.fromkeys(resource for task in sorts for resource in task.on))

    @cached_property
    def held(self) -> list[tuple[int, ...]]:
        """For each task the indices into `resources` that it holds."""
        sorts, sort_of = self.priced_alike
        number = {resource: i for i, resource in enumerate(self.resources)}
        of_sort = [tuple(number[resource] for resource in task.on) for task in sorts]
        return [of_sort[sort] for sort in sort_of]


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the cyclic garbage collector: it takes two thirds of the time of building a plan.

    Tasks are tuples without cycles, but each ten thousand of them it looks at all.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
