"""Provide simulated GPUs to tests, and reset them afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

from simulated_gpu.device import SimulatedDevice
from simulated_gpu.tensors import devices


@contextmanager
def simulated_gpus(count: int = 1, *, may_fail: bool = False) -> Iterator[list[SimulatedDevice]]:
    """Yield devices; wait for all work afterwards, and raise its errors unless `may_fail`."""
    found = devices(count)
    delays = [device.delays for device in found]
    try:
        yield found
        for device in [] if may_fail else found:
            device.synchronize()
    finally:
        for device, before in zip(found, delays, strict=True):
            device.delays = before
            device.await_all()
            device.errors.clear()
