"""The plan of batches whose sizes are known: what a traced run has to conform to."""

from collections.abc import Iterator, Mapping, Sequence

from paceline.core.machine import Machine
from paceline.core.plan import Kind, Plan, Task, task_name
from paceline.core.timeline import Span
from paceline.core.workload import Workload
from paceline.strategies.hogbatch.work import Work
from paceline.strategies.hogbatch.workers import WorkerSpec


def replay(
    workload: Workload,
    machine: Machine,
    specs: Mapping[int, WorkerSpec],
    sizes: Mapping[int, Sequence[int]],
) -> Plan:
    """Return the plan in which each worker, by its number, gets batches of these sizes in turn.

    The machine's devices are called as the workers are. A GPU pushes its updates, whether others
    train beside it or not.
    """
    devices = {device.name: device for device in machine.devices}
    tasks: list[Task] = []
    for number, own in sizes.items():
        spec = specs[number]
        work = Work(workload, machine, devices[spec.name(number)], spec.threads, shared=True)
        tasks += _tasks(work, number, own)
    return Plan(tasks)


def _tasks(work: Work, number: int, sizes: Sequence[int]) -> Iterator[Task]:
    after: tuple[str, ...] = ()
    for step, size in enumerate(sizes):
        for stage in work.stages(size):
            name = task_name(step, stage.kind, stage.label, number)
            yield Task(name, stage.kind, stage.on, stage.cost, after, stage.part)
            after = (name,)


def traced_sizes(spans: Sequence[Span], numbers: Mapping[str, int]) -> dict[int, list[int]]:
    """Return the sizes of the traced batches of each worker, in their order, from its updates."""
    steps = sorted((span for span in spans if span.kind is Kind.STEP), key=lambda s: s.start_s)
    found: dict[int, list[int]] = {}
    for span in steps:
        found.setdefault(numbers[span.on[0].owner], []).append(int(span.part))
    return found
