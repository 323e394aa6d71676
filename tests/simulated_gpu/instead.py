"""Replace CUDA GPUs by simulated GPUs when this module is imported.

With PACELINE_SIMULATED_GPUS=2 in the environment, a process and its children have two simulated
GPUs. Forked children inherit this module. Other children import it if the folder `children` is on
their PYTHONPATH.
"""

import os
from functools import cache
from pathlib import Path

import torch

from paceline.links import devices
from paceline.links.devices import Device, cuda
from simulated_gpu import tensors
from simulated_gpu.device import NAME

CHILDREN = Path(__file__).parent / "children"
_real_found_gpus = cuda.found_gpus
_real_device_of, _real_device_named = devices._device_of, devices.device_named


def _num_simulated() -> int:
    return int(os.environ.get("PACELINE_SIMULATED_GPUS", "0"))


def _found_gpus(*, usable: bool) -> tuple[torch.device, ...]:
    if count := _num_simulated():
        return tuple(one.torch_device for one in tensors.devices(count))
    return _real_found_gpus(usable=usable)


@cache
def _device_of(device: torch.device) -> Device:
    if device.type != NAME:
        return _real_device_of(device)
    index = device.index or 0
    return tensors.devices(index + 1)[index]


def _device_named(name: str) -> torch.device:
    if _num_simulated():
        _found_gpus(usable=True)  # registers the device name with torch
    return _real_device_named(name)


cuda.found_gpus = _found_gpus
devices._device_of, devices.device_named = _device_of, _device_named
