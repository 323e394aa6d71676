"""Compute when each task of a plan starts and ends.

A task is ready when the last task that it waits for ends. Each resource serves ready tasks first
in, first out, like a CUDA stream; tasks that become ready at the same time are served in plan
order. A task that needs several resources waits for all of them, and keeps its place in each queue.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush, heappushpop

from paceline.core.cost import CostModel
from paceline.core.plan import Plan, without_collection
from paceline.core.timeline import Origin, Span, Timeline

_LOOKED_AT = 4  # periods that `steady_period` compares; up to three periods overlap in time
_ROUNDING = 1e-12  # tolerance for equal periods, relative to the timeline's makespan
Times = tuple[list[float], list[float]]  # when each task starts, and when it ends


# One long function, because a function call per task would halve its speed.
@without_collection()
def schedule(plan: Plan, cost: CostModel) -> Times:  # noqa: C901
    """Compute the start and end of each task, in seconds from the start of the plan."""
    held, children = plan.held, plan.children
    sorts, sort_of = plan.priced_alike
    seconds = [cost.seconds(task) for task in sorts]
    waiting = plan.num_parents.copy()
    # Until a task runs, its `start` is the latest end among the finished tasks that it waits for.
    start, end = [0.0] * len(waiting), [0.0] * len(waiting)
    free = [0.0] * len(plan.resources)
    heap = [(0.0, i) for i, parents in enumerate(waiting) if not parents]
    if not heap:
        return start, end
    time, i = heappop(heap)
    while True:
        for resource in held[i]:
            if free[resource] > time:
                time = free[resource]
        start[i] = time
        end[i] = time = time + seconds[sort_of[i]]
        for resource in held[i]:
            free[resource] = time
        released = None
        for child in children[i]:
            if start[child] < time:
                start[child] = time
            if waiting[child] == 1:
                if released is not None:
                    heappush(heap, released)
                released = (start[child], child)
            waiting[child] -= 1
        if released is not None:  # the usual case; heappushpop is cheaper than a push and a pop
            time, i = heappushpop(heap, released)
        elif heap:
            time, i = heappop(heap)
        else:
            return start, end


def simulate(plan: Plan, cost: CostModel) -> Timeline:
    """Return the timeline of a plan whose tasks take the seconds that `cost` predicts."""
    start, end = schedule(plan, cost)
    # arrays use less memory than lists of floats
    spans = _spans(plan, array("d", start), array("d", end))
    return Timeline(spans, Origin.PREDICTED, (0.0, max(end, default=0.0)))


def _spans(plan: Plan, start: Sequence[float], end: Sequence[float]) -> Iterator[Span]:
    for (own, on, _, _, num_samples), begin, stop in zip(plan.tasks, start, end, strict=True):
        step, kind, part, worker, sub_batch = own
        yield Span(kind, step, part, worker, on, begin, stop, sub_batch, num_samples)


def period(plan_of: Callable[[int], Plan], cost: CostModel, num_steps: int) -> float:
    """Return the seconds per step in steady state: (makespan(2 n) - makespan(n)) / n.

    n is `num_steps`; `plan_of(n)` returns the plan of n steps. Consecutive steps overlap, so this
    period can be shorter than every single step.
    """
    longer_s = makespan_s(plan_of(2 * num_steps), cost)
    return (longer_s - makespan_s(plan_of(num_steps), cost)) / num_steps


def steady_period(timeline: Timeline, num_steps: int, alike: int = 1) -> float | None:
    """Return the seconds per step if the last steps of a timeline repeat, otherwise None.

    A longer timeline would then only add copies of these steps. The plan repeats after a period
    of `alike` steps; the four periods before the last one must be equal.
    """
    # Leave out the last period, because no later period overlaps with it.
    first = (num_steps // alike - _LOOKED_AT - 1) * alike
    if first < 1:
        return None
    ends = [dict[tuple[object, ...], float]() for _ in range(_LOOKED_AT * alike)]
    for kind, step, part, worker, _, _, end_s, sub_batch, _ in timeline.spans:
        if first <= step < first + len(ends):
            ends[step - first][kind, part, worker, sub_batch] = end_s
    shifts: list[float] = []
    for before, later in zip(ends, ends[alike:], strict=False):
        if before.keys() != later.keys():
            return None
        shifts += (later[own] - before_s for own, before_s in before.items())
    if not shifts or max(shifts) - min(shifts) > _ROUNDING * timeline.makespan_s:
        return None
    apart = (_LOOKED_AT - 1) * alike
    return (max(ends[-1].values()) - max(ends[-1 - apart].values())) / apart


def makespan_s(plan: Plan, cost: CostModel) -> float:
    """Return the seconds from the start of a plan's first task to the end of its last."""
    _, end = schedule(plan, cost)
    return max(end, default=0.0)
