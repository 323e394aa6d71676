"""Find the best chunk: the number of layers that a strategy exchanges together."""

from dataclasses import replace
from math import inf, isclose
from typing import Any

from paceline.core.chunks import candidates, chunks
from paceline.core.cost import CostModel, Roofline, compute_lane
from paceline.core.machine import DeviceKind, Machine
from paceline.core.plan import COMPUTE, Cost, Kind, Task, TaskId
from paceline.core.simulate import makespan_s
from paceline.core.strategy import Strategy, Window
from paceline.core.workload import Workload
from paceline.planner.grouping import Prices, grouped


def with_best_chunk(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    cost: CostModel | None = None,
) -> Any:
    """Return `config` with the chunk that gives the shortest step.

    If several chunks give the same step time, the smallest one is chosen. Raises InvalidInput if
    the strategy cannot be planned.
    """
    model, shortest_s, found = cost or Roofline.of(machine), inf, dict[int, float]()
    devices, known = machine.first_devices(config.workers), Prices()
    # CPU workers copy between the layers of a chunk, so a chunk cannot be planned as one layer.
    is_layered = any(device.kind == DeviceKind.CPU for device in devices)
    lane = compute_lane(devices[0].name)  # a GPU synchronises with its host once per chunk
    sync = Task(TaskId(0, Kind.BACKWARD), (lane,), Cost(num_syncs=1))
    sync_s = model.seconds(sync) if devices[0].kind == DeviceKind.GPU else 0.0
    computing_s = 0.0  # the first device's computation per step, without synchronisation
    num_layers = len(workload.layers)
    parts = {size: chunks(num_layers, size) for size in candidates(num_layers)}
    for size, ranges in sorted(parts.items(), key=lambda part: len(part[1])):
        # A step takes at least its computing time, so skip sizes that cannot be the shortest.
        if computing_s + len(ranges) * sync_s > shortest_s:
            continue
        whole, prices, own = workload, model, replace(config, chunk=size)
        if not is_layered:
            whole, prices = grouped(workload, ranges, model, known)
            own = replace(config, chunk=1)
        plan = strategy.planning.plan(whole, machine, own, Window(1))
        if not computing_s:
            on_lane = (task for task in plan.tasks if lane in task.on and task.kind in COMPUTE)
            computing_s = sum(map(prices.seconds, on_lane)) - len(ranges) * sync_s
        found[size] = makespan_s(plan, prices)
        shortest_s = min(shortest_s, found[size])
    alike = (size for size, step_s in found.items() if isclose(step_s, shortest_s))
    return replace(config, chunk=min(alike))
