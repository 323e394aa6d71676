"""How long a device takes for each layer: what a rehearsal paces its layers by."""

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple

from paceline.core.cost import Rate, Roofline, compute_lane
from paceline.core.plan import Kind, Task
from paceline.core.workload import Cost, Workload


class Totals(NamedTuple):
    """Seconds of a step's phases, as papers and profiles give them."""

    forward_s: float
    backward_s: float
    update_s: float


class LayerTimes(NamedTuple):
    """Seconds of each layer, both ways in forward order, and of the weight update."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: float


def layer_times(workload: Workload, rate: Rate, totals: Totals | None = None) -> LayerTimes:
    """Return what each layer takes on a device of that rate, priced as `Roofline` does.

    With `totals` the layers keep their proportions, and each phase is scaled to its total. A
    device's rate is `Roofline.of(machine).rates[compute_lane(device.name)]`. ValueError for a
    negative total, and for a phase that costs nothing but should take time.
    """
    lane = compute_lane(workload.name)
    roofline = Roofline({lane: rate})

    def seconds(kind: Kind, cost: Cost) -> float:
        return roofline.seconds(Task(kind.value, kind, (lane,), cost))

    forward_s = tuple(seconds(Kind.FORWARD, layer.forward) for layer in workload.layers)
    backward_s = tuple(seconds(Kind.BACKWARD, layer.backward) for layer in workload.layers)
    update_s = seconds(Kind.STEP, update_cost(workload))
    if totals is None:
        return LayerTimes(forward_s, backward_s, update_s)
    return LayerTimes(
        _scaled("forward", forward_s, totals.forward_s),
        _scaled("backward", backward_s, totals.backward_s),
        *_scaled("update", (update_s,), totals.update_s),
    )


def update_cost(workload: Workload) -> Cost:
    """Return the work of a weight update: momentum SGD reads three values and writes two."""
    num_tensors = sum(len(layer.parameters) for layer in workload.layers)
    return Cost(4 * workload.num_parameters, 5 * workload.gradient_nbytes, 2 * num_tensors)


def _scaled(phase: str, seconds: Sequence[float], total_s: float) -> tuple[float, ...]:
    now_s = fsum(seconds)
    if total_s < 0:
        raise ValueError(f"{phase}: a phase cannot take {total_s} s")
    if not now_s and total_s:
        raise ValueError(
            f"{phase}: {total_s} s cannot be shared among layers that cost nothing at this rate"
        )
    return tuple(time * total_s / now_s if now_s else 0.0 for time in seconds)
