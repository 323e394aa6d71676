"""Adapt the compute speeds of a machine to `--precision` and `--measured`.

In mixed precision, as with torch.autocast:

    parameters, gradients, optimizer state, exchange    float32
    activations, also those kept for backward           half the bytes
    parameters used by layers                           half-precision copies, kept until backward
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

from paceline.core.errors import InvalidInput
from paceline.core.machine import Device, Machine
from paceline.core.workload import Layer, Workload
from paceline.planner.forecast import forecast_alone

Precision = Literal["float32", "bfloat16", "float16"]
_RATE = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*/\s*s(?:@([0-9]+))?")


def in_precision(
    machine: Machine,
    workload_of: Callable[[int], Workload],
    precision: Precision,
    *,
    is_measured: bool,
) -> tuple[Machine, Callable[[int], Workload]]:
    """Convert a machine and its workloads from float32 to a precision.

    `workload_of`: returns the workload for a number of samples. `is_measured`: the machine will be
    calibrated with a rate measured in this precision. Raises InvalidInput for an unknown precision
    and, if `is_measured` is False, for a device without a speed in this precision.
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
    # The first layer keeps no copy for backward, because no gradient of its input is computed.
    layers = [_layer_in_half(layer, layer.gradient_nbytes // 2) for layer in others]
    return replace(workload, layers=(_layer_in_half(first, 0), *layers))


def _layer_in_half(layer: Layer, copied_nbytes: int) -> Layer:
    kept, working = layer.kept_nbytes, layer.working_nbytes
    return replace(
        layer,
        activation_nbytes=-(-layer.activation_nbytes // 2),
        kept_nbytes=None if kept is None else -(-kept // 2) + copied_nbytes,
        working_nbytes=None if working is None else -(-working // 2),
        forward=replace(layer.forward, nbytes=layer.forward.nbytes / 2),
        backward=replace(layer.backward, nbytes=layer.backward.nbytes / 2),
    )


@dataclass(frozen=True)
class DeviceRate:
    """Measured throughput of one device alone.

    `batch_size`: samples per step of the measurement; None: the number of samples that the plan
    gives to a worker.
    """

    samples_per_s: float
    batch_size: int | None = None

    @classmethod
    def parse(cls, text: str | float) -> "DeviceRate":
        """Parse "350/s", "350/s@128", or a number of samples per second."""
        match = _RATE.fullmatch(text if isinstance(text, str) else f"{text!r}/s")
        rate = float(match[1]) if match else 0.0
        batch = int(match[2]) if match and match[2] else None
        if not 0 < rate < inf or batch == 0:
            raise InvalidInput(
                "measured",
                "must be the throughput of one device in samples per second",
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
    """Scale the speeds of all devices by one factor, so that the first device reaches `rate`.

    `usual_batch`: batch size of the measurement if `rate` has none. Each device gets at least the
    memory that this batch requires, because the measured device has trained such a batch.
    """
    batch_size = rate.batch_size or usual_batch
    # Ignore how fast hosts load samples, because `rate` is the speed of a device only.
    found = forecast_alone(workload_of(batch_size), machine.with_each("hosts", samples_per_s=None))
    factor = rate.samples_per_s / found.samples_per_s
    (needed,) = found.memory_nbytes.values()
    source = f"measured: {rate.samples_per_s:g} samples/s in batches of {batch_size}"
    devices = tuple(
        faster(one, factor, memory_bytes=max(one.memory_bytes, needed), source=source)
        for one in machine.devices
    )
    return machine.model_copy(update={"devices": devices})


def faster(device: Device, factor: float, **facts: object) -> Device:
    """Multiply a device's compute speed by `factor`, and replace the fields in `facts`."""
    speeds = {
        "flops_per_s": factor * device.flops_per_s,
        "memory_bandwidth_bytes_per_s": factor * device.memory_bandwidth_bytes_per_s,
        "call_latency_s": device.call_latency_s / factor,
    }
    return device.model_copy(update=speeds | facts)
