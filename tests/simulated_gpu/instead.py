"""Replace CUDA GPUs by simulated GPUs when this module is imported.

With PACELINE_SIMULATED_GPUS=2 in the environment, a process and its children have two simulated
GPUs. Forked children inherit this module. Other children import it if the folder `children` is on
their PYTHONPATH.
"""

import os
from functools import cache
from pathlib import Path

import torch

from paceline.core.errors import InvalidInput
from paceline.links import devices
from paceline.links.devices import Device, cuda
from simulated_gpu import tensors
from simulated_gpu.device import NAME

CHILDREN = Path(__file__).parent / "children"
_COUNT = "PACELINE_SIMULATED_GPUS"
_real_gpus, _real_num_gpus = cuda.gpus, cuda.num_gpus
_real_device_of, _real_device_named = devices._device_of, devices.device_named


def _num_simulated() -> int:
    text = os.environ.get(_COUNT, "0")
    if not text.isdecimal():
        raise InvalidInput(_COUNT, f"{text!r} is not a number of GPUs", hint="use 1, 2, ...")
    return int(text)


def _gpus() -> tuple[torch.device, ...]:
    if count := _num_simulated():
        return tuple(one.torch_device for one in tensors.devices(count))
    return _real_gpus()


def _num_gpus() -> int:
    return _num_simulated() or _real_num_gpus()


@cache
def _device_of(device: torch.device) -> Device:
    if device.type != NAME:
        return _real_device_of(device)
    index = device.index or 0
    return tensors.devices(index + 1)[index]


def _device_named(name: str) -> torch.device:
    if _num_simulated():
        _gpus()  # registers the device name with torch
    return _real_device_named(name)


cuda.gpus, cuda.num_gpus = _gpus, _num_gpus
devices._device_of, devices.device_named = _device_of, _device_named
