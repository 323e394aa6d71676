"""The computation of a synchronous data-parallel step, which the strategies have in common.

worker0 compute   load  fwd1 fwd2 fwd3 | bwd3 bwd2 bwd1 | ... step

What lies between backward and the weight update is the strategy's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from paceline.core.cost import compute_lane
from paceline.core.machine import Device
from paceline.core.pace import update_cost
from paceline.core.plan import Cost, Kind, Task, task_name
from paceline.core.workload import Workload


@dataclass(frozen=True)
class ComputeStep:
    """What the workers compute in each step of a window, priced once."""

    workload: Workload
    devices: tuple[Device, ...]

    @property
    def workers(self) -> range:
        """All workers."""
        return range(len(self.devices))

    @cached_property
    def load(self) -> Cost:
        """The batch is read and written once."""
        return Cost(nbytes=2 * self.workload.input_nbytes, num_calls=1)

    @cached_property
    def update(self) -> Cost:
        """All parameters of the model are updated."""
        return update_cost(self.workload)

    def tasks(self, step: int, worker: int, after: tuple[str, ...]) -> Iterator[Task]:
        """Yield one worker's load, forward and backward, which follow one another."""
        on = (compute_lane(self.devices[worker].name),)
        name = task_name(step, Kind.LOAD, worker=worker)
        yield Task(name, Kind.LOAD, on, self.load, after)
        for kind, layers in (
            (Kind.FORWARD, self.workload.layers),
            (Kind.BACKWARD, self.workload.in_backward_order),
        ):
            for layer in layers:
                after, name = (name,), task_name(step, kind, layer.name, worker)
                cost = layer.forward if kind is Kind.FORWARD else layer.backward
                yield Task(name, kind, on, cost, after, layer.name)

    def after_backward(self, step: int, worker: int) -> str:
        """Return the name of the task with which a worker's backward ends."""
        last = self.workload.in_backward_order[-1].name
        return task_name(step, Kind.BACKWARD, last, worker)

    def step_task(self, step: int, worker: int, after: tuple[str, ...]) -> Task:
        """Return one worker's weight update."""
        on = (compute_lane(self.devices[worker].name),)
        return Task(task_name(step, Kind.STEP, worker=worker), Kind.STEP, on, self.update, after)


def after_update(step: int, worker: int) -> tuple[str, ...]:
    """Return what a step's load waits for if every worker updates its own weights."""
    return (task_name(step - 1, Kind.STEP, worker=worker),) if step else ()
