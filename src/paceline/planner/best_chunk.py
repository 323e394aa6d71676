"""The best number of layers that a strategy exchanges together, among those a tuner would try.

A plan of chunks is one of larger layers, each exchanged by itself: what is computed between two
exchanges is one task. So a search simulates a few tasks for each chunk, and not all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

from paceline.core.chunks import candidates, chunks
from paceline.core.cost import CostModel, ProfiledCost, Roofline, compute_lane
from paceline.core.machine import Machine
from paceline.core.plan import COMMUNICATION, Kind, Lane, Plan, PriceKey, Task, TaskId
from paceline.core.simulate import period
from paceline.core.strategy import Strategy, Window
from paceline.core.workload import Layer, Workload

_Seconds = Mapping[tuple[str, Kind, str], float]  # of a device's name and a layer's


def with_best_chunk(
    workload: Workload,
    machine: Machine,
    strategy: Strategy,
    config: Any,
    cost: CostModel | None = None,
) -> Any:
    """Return the configuration with the chunk of the shortest step.

    The strategy exchanges `core.chunks` of the layers in the order of backward. Windows are short:
    sizes are only compared with each other. InvalidInput if it does not fit.
    """
    model, sizes = cost or Roofline.of(machine), candidates(len(workload.layers))
    devices = [device.name for device in machine.first_devices(config.workers)]
    seconds = _layer_seconds(workload, devices, model)

    def plan_of(whole: Workload, size: int, num_steps: int) -> Plan:
        asked = replace(config, chunk=size)
        return strategy.planning.plan(whole, machine, asked, Window(num_steps))

    def step_s(size: int) -> float:
        whole, members = _in_chunks(workload, size)
        prices = ProfiledCost(_of_chunks(members, devices, seconds), model)
        return period(partial(plan_of, whole, 1), prices, 1)

    def step_of_layers_s(size: int) -> float:
        return period(partial(plan_of, workload, size), model, 1)

    fewest, _ = _in_chunks(workload, sizes[-1])
    comes_between = _exchanges_while_computing(plan_of(fewest, 1, 1))
    best = min(sizes, key=step_of_layers_s if comes_between else step_s)
    return replace(config, chunk=best)


def _exchanges_while_computing(plan: Plan) -> bool:
    """Return True if exchanges need what computes, and so run between the layers of a chunk."""
    return any(
        on.lane in (Lane.COMPUTE, Lane.CORE)
        for task in plan.first_step
        if task.kind in COMMUNICATION
        for on in task.on
    )


def _of_chunks(
    members: Mapping[str, Sequence[str]], devices: Sequence[str], seconds: _Seconds
) -> dict[PriceKey, float]:
    """Return the seconds of each chunk's forward and backward on each device."""
    return {
        PriceKey(device, kind, name): sum(seconds[device, kind, each] for each in layers)
        for name, layers in members.items()
        for device in devices
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }


def _layer_seconds(workload: Workload, devices: Sequence[str], model: CostModel) -> _Seconds:
    """Return the seconds of each layer's forward and backward on each device."""
    found = {}
    for device in devices:
        on = (compute_lane(device),)
        for layer in workload.layers:
            for kind, cost in ((Kind.FORWARD, layer.forward), (Kind.BACKWARD, layer.backward)):
                task = Task(TaskId(0, kind, layer.name), on, cost)
                found[device, kind, layer.name] = model.seconds(task)
    return found


def _in_chunks(workload: Workload, size: int) -> tuple[Workload, dict[str, list[str]]]:
    """Return the workload with a layer for each chunk, and the names of the layers in each.

    Their names are no layer's, so that nobody takes a profiled layer's time for theirs.
    """
    ready, made, members = workload.in_backward_order, list[Layer](), dict[str, list[str]]()
    for number, place in enumerate(chunks(len(ready), size)):
        own = [ready[i] for i in place]
        name = f"chunk {number}"
        members[name] = [layer.name for layer in own]
        made.append(
            Layer(
                name,
                tuple(parameter for layer in own for parameter in layer.parameters),
                own[-1].activation_nbytes,
                reduce(add, (layer.forward for layer in own)),
                reduce(add, (layer.backward for layer in own)),
            )
        )
    # In the order of backward, which takes as long: forward is a chain without exchanges.
    whole = replace(workload, layers=tuple(made), backward_order=tuple(range(len(made))))
    return whole, members
