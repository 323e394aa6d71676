"""Set how fast devices compute: in a precision, or as fast as a measured device (`--measured`).

In mixed precision, as with torch.autocast:

    parameters, gradients, optimizer state, exchange    float32
    activations, also those kept for backward           half the bytes
    parameters used by layers                           half-precision copies, kept until backward
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.workload import Cost, Layer, Workload
from paceline.planner.forecast import forecast_alone

Precision = Literal["float32", "bfloat16", "float16"]
_RATE = re.compile(r"(?P<rate>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*/\s*s(?:@(?P<batch>[0-9]+))?")


def in_precision(
    machine: Machine,
    workload_of: Callable[[int], Workload],
    precision: Precision,
    *,
    is_measured: bool,
) -> tuple[Machine, Callable[[int], Workload]]:
    """Return the machine and the workloads as they are in a precision.

    `is_measured`: the machine will be calibrated with a rate measured in this precision. Raises
    InvalidInput for an unknown precision, and for a device whose speed in it is unknown.
    """
    if precision not in (known := get_args(Precision)):
        raise InvalidInput("precision", f"must be one of {', '.join(known)}", got=precision)
    if precision == "float32":
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


@dataclass(frozen=True)
class DeviceRate:
    """Measured throughput of one device alone.

    `batch_size`: samples per step of the measurement; None: a planned worker's batch size.
    """

    samples_per_s: float
    batch_size: int | None = None

    @classmethod
    def parse(cls, text: str | float) -> "DeviceRate":
        """Parse "350/s", "350/s@128", or a number of samples per second."""
        match = _RATE.fullmatch(text if isinstance(text, str) else f"{text!r}/s")
        try:
            rate = float(match["rate"]) if match else 0.0
        except ValueError:
            rate = 0.0
        batch = int(match["batch"]) if match and match["batch"] else None
        if match is None or not 0 < rate < float("inf") or batch == 0:
            raise InvalidInput(
                "measured",
                "must be samples per second of one device",
                got=text,
                hint="write 350/s, 350/s@128 for batches of 128, or the folder of a profile",
            )
        return cls(rate, batch)


def calibrated(
    machine: Machine,
    workload_of: Callable[[int], Workload],
    rate: DeviceRate,
    usual_batch: int,
) -> Machine:
    """Scale all devices' speeds by one factor, so that the first reaches the rate.

    `usual_batch`: the batch size of a rate without one. Each device's memory is raised to what this
    batch requires, because the measured device has trained it.
    """
    batch_size = rate.batch_size or usual_batch
    # Ignore how fast hosts load samples, because the rate is that of the device.
    found = forecast_alone(workload_of(batch_size), machine.with_each("hosts", samples_per_s=None))
    slower = found.samples_per_s / rate.samples_per_s
    (needed,) = found.memory_nbytes.values()
    source = f"measured: {rate.samples_per_s:g} samples/s in batches of {batch_size}"
    devices = tuple(
        device.model_copy(
            update={
                "flops_per_s": device.flops_per_s / slower,
                "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s / slower,
                "call_latency_s": device.call_latency_s * slower,
                "memory_bytes": max(device.memory_bytes, needed),
                "source": source,
            }
        )
        for device in machine.devices
    )
    return machine.model_copy(update={"devices": devices})
