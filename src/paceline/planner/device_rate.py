"""Calibrate a machine's devices with the measured throughput of one device (`--measured`)."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.errors import InvalidInput
from paceline.core.machine import Machine
from paceline.core.workload import Workload
from paceline.planner.forecast import forecast_alone

_RATE = re.compile(r"(?P<rate>[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*/\s*s(?:@(?P<batch>[0-9]+))?")


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
        match = _RATE.fullmatch(str(text) if isinstance(text, str) else f"{text!r}/s")
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
                hint="write 350/s, or 350/s@128 for batches of 128",
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
