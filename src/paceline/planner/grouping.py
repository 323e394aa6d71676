"""Plan consecutive layers as one layer, if no exchange begins between them.

A plan then has fewer tasks. If exchanges begin when gradients of layers e, d and a are ready:

    layers   a   b   c  |  d  |  e   f
    groups   [a to c]      d    [e to f]
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from math import inf, isclose
from operator import add
from typing import Any

from paceline.core.chunks import candidates, chunks
from paceline.core.cost import CostModel, Roofline, compute_lane
from paceline.core.errors import InvalidInput
from paceline.core.machine import DeviceKind, Machine
from paceline.core.plan import COMMUNICATION, COMPUTE, Cost, Kind, Plan, Resource, Task, TaskId
from paceline.core.simulate import makespan_s, period
from paceline.core.strategy import Strategy, Window
from paceline.core.workload import Layer, Workload

PASSES = (Kind.FORWARD, Kind.BACKWARD)


# Seconds of a forward or backward pass, by its resources, its kind, and its layer's name.
Prices = dict[tuple[tuple[Resource, ...], Kind, str], float]


@dataclass(frozen=True)
class GroupCost:
    """Cost model in which a pass of a group takes as long as the passes of its layers together.

    `members`: layers of each group of at least two layers, by the group's name. `model`:
    cost model of single layers and all other tasks. `known`: cache of the layers' times, which
    several groupings share.
    """

    members: dict[str, tuple[Layer, ...]]
    model: CostModel
    known: Prices

    def seconds(self, task: Task) -> float:
        """Return the seconds of a task."""
        members = self.members.get(task.part, ()) if task.kind in PASSES else ()
        if not members:
            return self.model.seconds(task)
        seconds = sum(self._pass_s(task, layer) for layer in members)
        if task.cost.num_syncs:
            alone = task._replace(cost=Cost(num_syncs=task.cost.num_syncs))
            seconds += self.model.seconds(alone)
        return seconds

    def _pass_s(self, task: Task, layer: Layer) -> float:
        key = task.on, task.kind, layer.name
        found = self.known.get(key)
        if found is None:
            cost = layer.forward if task.kind is Kind.FORWARD else layer.backward
            alone = Task(TaskId(0, task.kind, layer.name), task.on, cost)
            found = self.known[key] = self.model.seconds(alone)
        return found


def grouped(
    workload: Workload, groups: Sequence[Sequence[int]], model: CostModel, known: Prices
) -> tuple[Workload, GroupCost]:
    """Join each group of layers into one layer; return the new workload and its cost model.

    `groups`: indices of layers in backward order. `model`, `known`: as in `GroupCost`.
    """
    ready, order = workload.in_backward_order, workload.backward_order
    members = [tuple(ready[i] for i in group) for group in groups]
    made = list(map(_joined, members))
    # In forward, order the groups like their last layers, which compute the groups' outputs.
    last = [max(order[i] for i in group) for group in groups]
    forward = sorted(range(len(groups)), key=last.__getitem__)
    backward = sorted(range(len(groups)), key=forward.__getitem__)
    joined = replace(
        workload, layers=tuple(made[i] for i in forward), backward_order=tuple(backward)
    )
    several = {one.name: own for one, own in zip(made, members, strict=True) if len(own) > 1}
    return joined, GroupCost(several, model, known)


def _joined(layers: Sequence[Layer]) -> Layer:
    """Join layers, given in backward order, into one layer."""
    if len(layers) == 1:
        return layers[0]
    return Layer(
        f"{layers[-1].name} to {layers[0].name}",
        tuple(parameter for layer in layers for parameter in layer.parameters),
        layers[0].activation_nbytes,
        reduce(add, (layer.forward for layer in layers)),
        reduce(add, (layer.backward for layer in layers)),
    )


def _groups_of(step: Plan, workload: Workload) -> list[list[int]]:
    """Group the layers of a step; return the groups as indices in backward order.

    Two neighbouring layers are in one group if, on every worker, their backward passes directly
    follow each other, and so do their forward passes (`_follower`).
    """
    after: dict[tuple[Kind, str], set[str]] = defaultdict(set)
    for task, children in zip(step.tasks, step.children, strict=True):
        # Skip passes over a sub-batch or another batch size: costs are for the workload's batch.
        if task.kind in PASSES and task.id.sub_batch is None and not task.num_samples:
            after[task.kind, task.part].add(_follower(step, task, children))
    groups = [[0]]
    for i, (one, other) in enumerate(pairwise(workload.in_backward_order), start=1):
        before, own = one.name, other.name
        if after[Kind.BACKWARD, before] == {own} and after[Kind.FORWARD, own] == {before}:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _follower(step: Plan, task: Task, children: Sequence[int]) -> str:
    """Return the layer whose pass directly follows the pass `task`; "" if there is none.

    The following pass is of the same kind, uses the same resources, and depends only on `task`. No
    other task depends on `task`.
    """
    if len(children) != 1 or step.num_parents[children[0]] != 1:
        return ""
    child = step.tasks[children[0]]
    is_next = (child.kind, child.on, child.id.sub_batch) == (task.kind, task.on, None)
    return child.part if is_next else ""


def _shares_lanes(step: Plan, layers: Collection[str]) -> bool:
    """Whether an exchange uses a resource on which one of the named layers computes."""
    passes = (task for task in step.tasks if task.kind in PASSES and task.part in layers)
    computing = {on for task in passes for on in task.on}
    exchanges = (task for task in step.tasks if task.kind in COMMUNICATION)
    return any(not computing.isdisjoint(task.on) for task in exchanges)


class Windows:
    """Plans windows (consecutive steps); raises InvalidInput if a step cannot be planned.

    Consecutive layers are planned as one layer (a group) if a step then takes equally long.
    `step`: plan of one step, without groups. `model`: cost model for plans without groups.
    `cost`: cost model for the plans that `of` returns, which may have groups. `is_balanced`:
    whether batches are split by the devices' speeds.
    """

    def __init__(
        self,
        strategy: Strategy,
        workload: Workload,
        machine: Machine,
        config: Any,
        cost: CostModel | None = None,
        *,
        balanced: bool = False,
    ) -> None:
        self.strategy, self.workload, self.machine = strategy, workload, machine
        self.config, self.model = config, cost or Roofline.of(self.machine)
        planning = strategy.planning
        self.is_balanced = balanced and planning.plan_balanced is not None
        self._plan_of = (self.is_balanced and planning.plan_balanced) or planning.plan
        self._grouped, self.cost = workload, self.model
        self.step = self.of_layers(1)
        groups = _groups_of(self.step, workload)
        if len(groups) < len(workload.layers):
            self._group(groups)

    def _group(self, groups: Sequence[Sequence[int]]) -> None:
        """Plan each group of layers as one layer, unless the time of a step would change."""
        joined, cost = grouped(self.workload, groups, self.model, {})
        several = {layer.name for members in cost.members.values() for layer in members}
        # Asynchronous steps overlap, so another step's exchange may run between two layers of a
        # group. A comparison of single steps would not show such an exchange.
        if self.strategy.planning.is_asynchronous and _shares_lanes(self.step, several):
            return
        try:
            step = self._plan_of(joined, self.machine, _in_ones(self.config), Window(1))
        except InvalidInput:  # for example, option `head` of wheel names a grouped layer
            return
        if isclose(makespan_s(step, cost), makespan_s(self.step, self.model)):
            self._grouped, self.cost = joined, cost

    def compared_s(self, config: Any) -> float:
        """Return the approximate seconds of a step with `config`, to compare configurations."""
        if self.strategy.planning.is_asynchronous:
            return period(partial(self.of, config=config), self.cost, 1)
        return makespan_s(self.of(1, config), self.cost)

    def of(self, num_steps: int, config: Any = None) -> Plan:
        """Plan a window of `num_steps` steps; `config` replaces `self.config`."""
        asked = config or self.config
        asked = asked if self._grouped is self.workload else _in_ones(asked)
        return self._plan_of(self._grouped, self.machine, asked, Window(num_steps))

    def of_layers(self, num_steps: int) -> Plan:
        """Plan a window of `num_steps` steps without grouping layers."""
        return self._plan_of(self.workload, self.machine, self.config, Window(num_steps))


def _in_ones(config: Any) -> Any:
    """Set option `chunk` (layers per exchange), if any, to 1, because a group is one layer."""
    return replace(config, chunk=1) if hasattr(config, "chunk") else config


def with_best_chunk(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    cost: CostModel | None = None,
) -> Any:
    """Return `config` with the chunk size, in layers, that gives the shortest step.

    If several sizes give the same step time, the smallest is chosen. Raises InvalidInput if
    the strategy cannot be planned.
    """
    model, shortest_s, found = cost or Roofline.of(machine), inf, dict[int, float]()
    devices, known = machine.first_devices(config.workers), Prices()
    # CPU workers copy between the layers of a chunk, so a chunk cannot be planned as one layer.
    is_layered = any(device.kind == DeviceKind.CPU for device in devices)
    # A GPU synchronises with its host once per chunk.
    lane = compute_lane(devices[0].name)
    sync = Task(TaskId(0, Kind.BACKWARD), (lane,), Cost(num_syncs=1))
    sync_s = model.seconds(sync) if devices[0].kind == DeviceKind.GPU else 0.0
    computing_s = 0.0  # the first device's computing time per step, without synchronisation
    num_layers = len(workload.layers)
    parts = {size: chunks(num_layers, size) for size in candidates(num_layers)}
    for size, ranges in sorted(parts.items(), key=lambda part: len(part[1])):
        # Skip a size if its computing time alone is longer than the shortest step so far.
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
