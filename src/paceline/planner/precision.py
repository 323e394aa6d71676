"""Plan steps in mixed precision, as with torch.autocast.

    parameters, gradients, optimizer state, exchange    float32
    activations, also those kept for backward           half the bytes
    parameters used by layers                           half-precision copies, kept until backward

A device computes at its `half_flops_per_s`, or at a rate that was measured in this precision.
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
    """Return the machine and the workloads as they are in a precision.

    `is_measured`: the machine will be calibrated with a rate measured in this precision. Raises
    InvalidInput for an unknown precision. Without a measured rate, raises InvalidInput if a device
    has no `half_flops_per_s`.
    """
    if precision not in PRECISIONS:
        raise InvalidInput("precision", f"must be one of {', '.join(PRECISIONS)}", got=precision)
    if precision == PRECISIONS[0]:
        return machine, workload_of
    slow = next((one.name for one in machine.devices if one.half_flops_per_s is None), None)
    if slow is not None and not is_measured:
        raise InvalidInput(
            "precision",
            f"requires half_flops_per_s of device {slow} in machine {machine.name}",
            hint="add it, or pass --measured with a rate in this precision",
        )
    devices = tuple(
        one.model_copy(update={"flops_per_s": one.half_flops_per_s or one.flops_per_s})
        for one in machine.devices
    )
    return machine.model_copy(update={"devices": devices}), lambda size: in_half(workload_of(size))


def in_half(workload: Workload) -> Workload:
    """Halve the bytes of activations, and add the half-precision copies of parameters."""
    first, *others = workload.layers
    # Backward reads the copied parameters of all layers except the first.
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
