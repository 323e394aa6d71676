"""Steps in half precision: layers compute with values of two bytes, as autocast has them.

    parameters, gradients, the optimizer's state    float32, as without it; so is what is exchanged
    activations, and what backward reads of them    half the bytes, to keep and to move
    parameters as layers compute with them          copies in half precision, kept until backward

How fast devices compute so, their `half_flops_per_s` say, or a rate that was measured so.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Workload

Precision = Literal["float32", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")


def in_precision(
    machine: Machine,
    workload_of: Callable[[int], Workload],
    precision: Precision,
    *,
    is_measured: bool,
) -> tuple[Machine, Callable[[int], Workload]]:
    """Return the machine and the steps as they are in that precision.

    InvalidInput for an unknown precision, and if nothing says how fast a device computes in it:
    neither the machine, nor a rate of one device that `is_measured`.
    """
    if precision not in PRECISIONS:
        raise InvalidInput("precision", f"must be one of {', '.join(PRECISIONS)}", got=precision)
    if precision == PRECISIONS[0]:
        return machine, workload_of
    slow = next((one.name for one in machine.devices if one.half_flops_per_s is None), None)
    if slow is not None and not is_measured:
        raise InvalidInput(
            "precision",
            f"{machine.name!r} does not say the half_flops_per_s of {slow}",
            hint="add it, or say what one device makes so with --measured",
        )
    devices = tuple(
        one.model_copy(update={"flops_per_s": one.half_flops_per_s or one.flops_per_s})
        for one in machine.devices
    )
    return machine.model_copy(update={"devices": devices}), lambda size: in_half(workload_of(size))


def in_half(workload: Workload) -> Workload:
    """Return the step with activations of half the bytes."""
    first, *others = workload.layers
    # Backward reads the copies of parameters, but for the first layer's: nothing is before it.
    layers = [_layer_in_half(layer, layer.gradient_nbytes // 2) for layer in others]
    return replace(workload, layers=(_layer_in_half(first, 0), *layers))


def _layer_in_half(layer: Layer, copied_nbytes: int) -> Layer:
    kept, working = layer.kept_nbytes, layer.working_nbytes
    return replace(
        layer,
        activation_nbytes=-(-layer.activation_nbytes // 2),
        kept_nbytes=None if kept is None else -(-kept // 2) + copied_nbytes,
        working_nbytes=None if working is None else -(-working // 2),
        forward=_cost_in_half(layer.forward),
        backward=_cost_in_half(layer.backward),
    )


def _cost_in_half(cost: Cost) -> Cost:
    return replace(cost, nbytes=cost.nbytes / 2)
