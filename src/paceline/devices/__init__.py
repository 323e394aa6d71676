"""Devices of this process: what may be done with them, behind one small protocol.

    device = device_of(tensor.device)
    copies = device.new_stream()
    copies.wait_stream(device.current_stream())
    with device.use(copies):
        there.copy_(here, non_blocking=True)
    device.current_stream().wait(copies.record())

Three kinds: the host's cores, NVIDIA's GPUs, and a simulated GPU, with which all of that can be
tested on a machine without one: with PACELINE_SIMULATED_GPUS=2 in its environment a process has
two of those in place of NVIDIA's.
"""

import os
from functools import cache

import torch

from paceline.core.errors import InvalidInput
from paceline.devices.device import Device as Device
from paceline.devices.device import DeviceMemory as DeviceMemory
from paceline.devices.device import Event as Event
from paceline.devices.device import Stream as Stream

_SIMULATED = "PACELINE_SIMULATED_GPUS"


@cache
def device_of(device: torch.device) -> Device:
    """Return what can be done with a device of torch's. InvalidInput if it is of another kind."""
    if device.type == "cpu":
        from paceline.devices.host import HostDevice

        return HostDevice(device)
    if device.type == "cuda":
        from paceline.devices.cuda import CudaDevice

        return CudaDevice(device)
    from paceline.devices import simulated, simulated_tensors

    if device.type == simulated.NAME:
        index = device.index or 0
        return simulated_tensors.devices(index + 1)[index]
    raise InvalidInput(
        f"device: {str(device)!r} is of a kind that is not known here; take 'cpu' or 'cuda'"
    )


def gpus() -> tuple[torch.device, ...]:
    """Return the GPUs that this process sees.

    Raises InvalidInput if there are some that cannot be used, as with a driver that is too old: to
    compute on cores instead would be slow without a word.
    """
    if count := int(os.environ.get(_SIMULATED, "0")):
        from paceline.devices import simulated_tensors

        return tuple(one.torch_device for one in simulated_tensors.devices(count))
    from paceline.devices import cuda

    return cuda.gpus()
