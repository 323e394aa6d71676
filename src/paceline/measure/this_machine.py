"""Describe the machine of this run, for plans and for results."""

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.core.cost import Rate
from paceline.core.losses import Losses
from paceline.core.machine import Device, DeviceKind, Host, Machine
from paceline.core.workload import Cost, Workload
from paceline.links.cores import usable_cores
from paceline.links.devices import device_of
from paceline.links.group import Group
from paceline.native import instruction_sets

# Speed of a memory or link whose time is already part of another measurement.
UNLIMITED_BYTES_PER_S = 1e18
_PROFILED = "measured by the profile of this run"


def speed_of(workload: Workload, seconds: float) -> Rate:
    """Return the flops/s and bytes/s at which all forward and backward passes take `seconds`.

    Each pass is limited by only one of the two. So flops/s is higher than total flops /
    `seconds`, and bytes/s is higher than total bytes / `seconds`.
    """
    parts = [cost for layer in workload.layers for cost in (layer.forward, layer.backward)]
    whole = sum(parts, Cost())
    share = sum(
        max(part.flops / (whole.flops or 1), part.nbytes / (whole.nbytes or 1)) for part in parts
    )
    pace = share / seconds
    return Rate((whole.flops or 1) * pace, (whole.nbytes or 1) * pace)


def this_machine(group: Group, speeds: Sequence[Rate]) -> Machine:
    """Return a machine with a device per rank and a host per container, but without links.

    Containers count as hosts, because their ranks do not share memory. A strategy's `calibrate`
    adds links. All hosts get the slowest device's memory bandwidth, which is a lower bound.
    """
    kind = device_of(group.device).kind
    places = [member.place for member in group.members]
    different = dict.fromkeys(places)
    names = {
        place: "this-host" if len(different) == 1 else f"host{i}"
        for i, place in enumerate(different)
    }
    slowest = min(speed.nbytes_per_s for speed in speeds)
    hosts = tuple(host_here(name, _PROFILED, slowest) for name in names.values())
    devices = tuple(
        device_here(f"{kind}{rank}", names[place], kind, speed, _PROFILED)
        for rank, (place, speed) in enumerate(zip(places, speeds, strict=True))
    )
    return Machine(name="this-machine", hosts=hosts, devices=devices, losses=Losses.none(_PROFILED))


def host_here(
    name: str,
    source: str,
    memory_bandwidth_bytes_per_s: float = UNLIMITED_BYTES_PER_S,
    cores: int | None = None,
    message_bytes_per_s: float | None = None,
) -> Host:
    """Return this computer as a host; `cores` defaults to all of its cores."""
    return Host(
        name=name,
        cores=cores or os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        message_bytes_per_s=message_bytes_per_s,
        source=source,
    )


def device_here(
    name: str, host: str, kind: DeviceKind, speed: Rate, source: str, **more: Any
) -> Device:
    """Return a device of this computer; `more`: other fields of the device."""
    return Device(
        name=name,
        host=host,
        kind=kind,
        flops_per_s=speed.flops_per_s,
        memory_bytes=memory_bytes(),
        memory_bandwidth_bytes_per_s=speed.nbytes_per_s,
        source=source,
        **more,
    )


def facts(device: torch.device) -> dict[str, Any]:
    """Return this machine's hardware and the software versions, for a result."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": usable_cores(),
        "instruction_sets": instruction_sets(),
        "memory_bytes": memory_bytes(),
        "device": device_of(device).name,
        "system": f"{platform.system()} {platform.release()}",
        "threads_per_worker": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": version("paceline"),
    }


def memory_bytes() -> int:
    """Return the size of this computer's whole memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
