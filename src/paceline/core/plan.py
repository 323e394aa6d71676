"""Tasks and plans: what one window of training does, on which resources, and in which order."""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from enum import StrEnum
from functools import cached_property
from itertools import chain, count, pairwise, repeat, takewhile
from typing import Any, NamedTuple, Self

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
        self._repeats = 0
        self._step: Callable[[int], Iterable[Task]] | None = None
        with without_collection():
            self._made = tuple(tasks)
            self._link()

    def _link(self) -> None:
        """Check the tasks that were made, and number what each waits for."""
        place: dict[TaskId, int] = {}
        # Most tasks of a wide plan have one child or none: a tuple of those is smaller than a list.
        children: list[list[int] | tuple[int, ...]] = []
        self.num_parents: list[int] = []
        last = None
        for i, (own, on, _, after, _) in enumerate(self._made):
            for before in after:
                # Most tasks wait for the last one, whose identity need not be hashed for it.
                parent = i - 1 if before is last else place.get(before)
                if parent is None:
                    raise ValueError(
                        f"{own.name}: waits for {before.name!r}, which is no earlier task"
                    )
                known = children[parent]
                if isinstance(known, list):
                    known.append(i)
                else:
                    children[parent] = [*known, i] if known else (i,)
            if not on:
                raise ValueError(f"{own.name}: a task has to run on something")
            if place.setdefault(own, i) != i:
                raise ValueError(f"{own.name}: the name stands twice")
            self.num_parents.append(len(after))
            children.append(())
            last = own
        self.children: list[list[int] | tuple[int, ...]] = children

    @classmethod
    def of_steps(cls, tasks: Callable[[int], Iterable[Task]], num_steps: int) -> Self:
        """Return the plan of steps of which each but the first repeats the one before.

        `tasks` gives the tasks of a step, which wait for none but their own and those of the step
        before. Only two steps are made; the others differ from the second in their number. Raises
        ValueError if the first two steps have other tasks.
        """
        with without_collection():
            plan = cls(chain.from_iterable(map(tasks, range(min(num_steps, 2)))))
            plan._step = tasks
            return plan._repeated(num_steps) if num_steps > 2 else plan

    @property
    def repeats(self) -> bool:
        """True if its steps are known to repeat."""
        return self._step is not None

    def lasting(self, num_steps: int) -> Self | None:
        """Return the plan of so many of the same steps; None if these are not known to repeat.

        Of a plan of two steps or more no task is made again.
        """
        if self._step is None:
            return None
        with without_collection():
            return self._first_of_two if num_steps == 1 else self._of_two._repeated(num_steps)

    @property
    def _of_two(self) -> Self:
        """The plan of the two steps that are made."""
        return self._two if self._repeats or not self._made[-1].step else self

    @cached_property
    def _two(self) -> Self:
        assert self._step is not None
        plan = type(self)(chain(self._made, self._step(1)))
        plan._step = self._step
        return plan

    @property
    def _first_of_two(self) -> Self:
        """The plan of step 0 alone."""
        plan = type(self)(self.first_step)
        plan._step, plan.__dict__["_two"] = self._step, self._of_two
        return plan

    def _repeated(self, num_steps: int) -> Self:
        """Return the plan of so many steps, two or more, from that of two."""
        if num_steps == 2:
            return self
        size, odd = divmod(len(self._made), 2)
        first, second = self._made[:size], self._made[size:]
        if odd or [task.id[1:] for task in first] != [task.id[1:] for task in second]:
            raise ValueError("steps that repeat have the same tasks in the same order")
        plan, times = copy(self), num_steps - 2
        for derived in ("held", "tasks", "_by_name"):
            plan.__dict__.pop(derived, None)
        before = [[child - size for child in of if child >= size] for of in self.children[:size]]
        within = [[child - size for child in of] for of in self.children[size:]]
        pairs = zip(within, before, strict=True)
        both = [[*own, *(child + size for child in later)] for own, later in pairs]
        # All steps but the first and the last have the same children, moved by whole steps.
        plan.children = self.children[:size] + [
            [child + start for child in of] if of else ()
            for start in range(size, (times + 1) * size, size)
            for of in both
        ]
        last = self.children[size:]
        plan.children += [[child + times * size for child in of] if of else () for of in last]
        plan.num_parents = self.num_parents + self.num_parents[size:] * times
        plan._repeats, plan.__dict__["_two"] = times, self
        return plan

    def __len__(self) -> int:
        return len(self.num_parents)

    def __getitem__(self, name: str) -> Task:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Task]:
        return {task.name: task for task in self.tasks}

    @cached_property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, in issue order."""
        second = self._made[len(self._made) // 2 :]
        later = (_at(task, step) for step in range(2, 2 + self._repeats) for task in second)
        return (*self._made, *later)

    @property
    def first_step(self) -> tuple[Task, ...]:
        """The tasks of step 0, in issue order."""
        return tuple(takewhile(lambda task: task.step == 0, self._made))

    @property
    def priced_alike(self) -> tuple[list[Task], list[int]]:
        """One task of each sort, and for each task the index of its sort.

        No cost model can tell two tasks of a sort apart. A window repeats its steps, so that there
        are few sorts, however long it is: all but a task's step and worker is looked up by sort.
        """
        sorts, sort_of = self._made_alike
        return sorts, sort_of + sort_of[len(sort_of) // 2 :] * self._repeats

    @cached_property
    def _made_alike(self) -> tuple[list[Task], list[int]]:
        """The same of the tasks that were made."""
        numbers: dict[tuple[object, ...], int] = defaultdict(count().__next__)
        # A cost is told by its identity: steps share their layers' costs, and hashing one in Python
        # takes longer than scheduling a task.
        sort_of = [
            numbers[kind, part, sub_batch, on, id(cost), num_samples]
            for (_, kind, part, _, sub_batch), on, cost, _, num_samples in self._made
        ]
        first = dict(zip(reversed(sort_of), reversed(self._made), strict=True))
        return [first[sort] for sort in range(len(first))], sort_of

    def stretches(self) -> Iterator[tuple[int, int, Task, int]]:
        """Yield where each stretch of layers begins and ends, its first task, and its step.

        A stretch is one kind of computation of one worker, task after task; any other task is one
        by itself.
        """
        made, size = self._made, len(self._made) // 2
        begins, before = [], None
        for i, (own, on, _, _, _) in enumerate(made):
            alike = own.step, own.kind, own.worker, on
            if alike != before or own.kind not in COMPUTE:
                begins.append(i)
            before = alike
        bounds = list(pairwise((*begins, len(made))))
        yield from ((first, last, made[first], made[first].step) for first, last in bounds)
        second = [(first, last) for first, last in bounds if first >= size]
        for later in range(1, 1 + self._repeats):
            moved = later * size
            for first, last in second:
                yield first + moved, last + moved, made[first], 1 + later

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

    def columns(self) -> dict[str, Iterable[Any]]:
        """Return the fields of all tasks that their spans take over, by name."""
        sorts, sort_of = self.priced_alike
        columns: dict[str, Iterable[Any]] = {}
        for name in ("kind", "part", "on", "sub_batch", "num_samples"):
            columns[name] = map([getattr(task, name) for task in sorts].__getitem__, sort_of)
        ids = [task.id for task in self._made]
        repeated = ids[len(ids) // 2 :]
        later = (step for step in range(2, 2 + self._repeats) for _ in repeated)
        columns["step"] = chain((own.step for own in ids), later)
        columns["worker"] = (own.worker for own in chain(ids, *repeat(repeated, self._repeats)))
        return columns


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


def _at(task: Task, step: int) -> Task:
    """Return a task of step 1 as it is in a later step."""
    after = tuple(TaskId(before.step + step - 1, *before[1:]) for before in task.after)
    return task._replace(id=TaskId(step, *task.id[1:]), after=after)
