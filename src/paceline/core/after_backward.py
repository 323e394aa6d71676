"""Compute how long an exchange outlasts backward (Le et al. 2018, section 3.2).

    T_BP    backward of one worker alone                                         (definition 3.1)
    T_BP^i  from backward's start until all workers have layer i's sum           (definition 3.2)
    T       the largest T_BP^i: backward with the exchange of strategy `host`    (definition 3.3)
    T'      backward, then the exchange of strategy `tree`                       (definition 3.4)

If T is smaller than T', `host` is faster than `tree`. The paper adds up times as if copies never
waited for other copies; here the times come from a simulated step, in which copies do wait.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from paceline.core.cost import CostModel
from paceline.core.plan import COMMUNICATION, Kind, Plan, Task, TaskId
from paceline.core.timeline import Span, Timeline, intersection, length, union


@dataclass(frozen=True)
class AfterBackward:
    """Seconds of backward and of a strategy's exchange.

    `backward_s`: T_BP. `sync_s`: time added by synchronising a GPU with its host (the paper's sum
    of t_as). `left_s`: time from the end of backward to the weight update. `total_s`: T or T'.
    `exchange_s`: seconds during which any exchange runs. `hidden_s`: the part of `exchange_s`
    before the end of backward.
    """

    backward_s: float
    sync_s: float
    left_s: float
    total_s: float
    exchange_s: float = 0.0
    hidden_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Time that the exchange adds to backward (in the paper: T_O or T'_O)."""
        return self.total_s - self.backward_s


@dataclass(frozen=True)
class BackwardPhase:
    """The first step of a simulated plan, from the start of backward to the weight update.

    Backward is timed on the worker that finishes backward last, the exchange on all workers.
    """

    plan: Plan
    cost: CostModel
    timeline: Timeline

    @cached_property
    def tasks(self) -> dict[TaskId, Task]:
        """The tasks of the step, in the order of the plan."""
        return {task.id: task for task in self.plan.tasks if not task.step}

    @cached_property
    def spans(self) -> dict[TaskId, Span]:
        """The span of each task of the step."""
        return {span.id: span for span in self.timeline.spans if span.step == 0}

    @cached_property
    def _backward(self) -> list[Span]:
        passes: dict[int | None, list[Span]] = {}
        for span in self.spans.values():
            if span.kind is Kind.BACKWARD:
                passes.setdefault(span.worker, []).append(span)
        return max(passes.values(), key=lambda spans: spans[-1].end_s)

    @property
    def start_s(self) -> float:
        """Start of backward."""
        return self._backward[0].start_s

    @property
    def end_s(self) -> float:
        """End of backward."""
        return self._backward[-1].end_s

    @cached_property
    def exchange(self) -> list[Span]:
        """All copies, sums, encodings and messages."""
        return [span for span in self.spans.values() if span.kind in COMMUNICATION]

    @property
    def exchange_s(self) -> float:
        """Seconds during which any exchange runs."""
        return length(union(self.exchange))

    @property
    def hidden_s(self) -> float:
        """The part of `exchange_s` before the end of backward."""
        return length(intersection(union(self.exchange), [(self.start_s, self.end_s)]))

    @cached_property
    def last_update(self) -> Task:
        """The last weight update to start."""
        updates = (task for task in self.tasks.values() if task.kind is Kind.STEP)
        return max(updates, key=lambda task: self.spans[task.id].start_s)

    @cached_property
    def sync_s(self) -> float:
        """Seconds that synchronisations add to backward."""
        synced = (self.tasks[span.id] for span in self._backward)
        return sum(self._sync_s(task) for task in synced if task.cost.num_syncs)

    def _sync_s(self, task: Task) -> float:
        alone = task._replace(cost=replace(task.cost, num_syncs=0))
        return self.cost.seconds(task) - self.cost.seconds(alone)

    def times(self) -> AfterBackward:
        """Return the times of backward and of its exchange."""
        backward_s = sum(span.duration_s for span in self._backward) - self.sync_s
        update_s = self.spans[self.last_update.id].start_s
        left_s, total_s = update_s - self.end_s, update_s - self.start_s
        return AfterBackward(
            backward_s, self.sync_s, left_s, total_s, self.exchange_s, self.hidden_s
        )
