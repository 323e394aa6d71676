"""Compute how long an exchange continues after backward (Le et al. 2018, section 3.2).

    T_BP    backward of one worker alone                                         (definition 3.1)
    T_BP^i  from backward's start until all workers have layer i's gradient sum  (definition 3.2)
    T       the largest T_BP^i: backward with the exchange of strategy `host`    (definition 3.3)
    T'      backward, then the exchange of strategy `tree`                       (definition 3.4)

Strategy `host` sums gradients in host memory, during backward. Strategy `tree` sums them in a
binary tree, after backward. If T is smaller than T', `host` is faster. In the paper, copies never
wait for other copies; here the times come from a simulated step, in which copies do wait.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

from paceline.core.cost import CostModel
from paceline.core.plan import COMMUNICATION, Kind, Plan, Task
from paceline.core.timeline import Span, Timeline, intersection, length, union


@dataclass(frozen=True)
class AfterBackward:
    """Seconds of a step's backward pass and gradient exchange.

    `backward_s`: the backward pass (in the paper: T_BP). `sync_s`: synchronisations of the GPU with
    its host (in the paper: the sum of t_as). `total_s`: from the start of backward to the weight
    update (T or T'). `left_s`: its part after backward. `exchange_s`: time during which any
    exchange runs. `hidden_s`: its part before backward ends.
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


def after_backward(plan: Plan, cost: CostModel, timeline: Timeline) -> AfterBackward:
    """Measure a simulated plan's first step, from the start of backward to the weight update.

    Backward is timed on the worker that finishes it last. The exchange is timed on all workers.
    """
    spans = [span for span in timeline.spans if span.step == 0]
    passes = defaultdict[int | None, list[Span]](list)
    for span in spans:
        if span.kind is Kind.BACKWARD:
            passes[span.worker].append(span)
    backward = max(passes.values(), key=lambda own: own[-1].end_s)
    start_s, end_s = backward[0].start_s, backward[-1].end_s
    update_s = max(span.start_s for span in spans if span.kind is Kind.STEP)
    exchange = union(span for span in spans if span.kind in COMMUNICATION)
    timed = {span.id for span in backward}
    sync_s = sum(_sync_s(task, cost) for task in plan.tasks if task.id in timed)
    return AfterBackward(
        backward_s=sum(span.duration_s for span in backward) - sync_s,
        sync_s=sync_s,
        left_s=update_s - end_s,
        total_s=update_s - start_s,
        exchange_s=length(exchange),
        hidden_s=length(intersection(exchange, [(start_s, end_s)])),
    )


def _sync_s(task: Task, cost: CostModel) -> float:
    if not task.cost.num_syncs:
        return 0.0
    alone = task._replace(cost=replace(task.cost, num_syncs=0))
    return cost.seconds(task) - cost.seconds(alone)
