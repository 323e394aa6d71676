"""The machine that this run is on: as a plan sees it, and as a result states it."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.core.machine import Device, Host, Machine
from paceline.core.workload import Cost, Workload
from paceline.links.group import Group
from paceline.native import instruction_sets

_PROFILED = "measured by the profile of this run"


@dataclass(frozen=True)
class Speed:
    """What the layers of the profiled model reached on a device."""

    flops_per_s: float
    nbytes_per_s: float

    @classmethod
    def of(cls, workload: Workload, seconds: float) -> "Speed":
        """Return the speed at which the layers together take `seconds`, forward and backward.

        Of one that is bound by arithmetic and one that is bound by memory, each is slowed down by
        one of the two alone: both are faster than if the whole time were theirs.
        """
        parts = [cost for layer in workload.layers for cost in (layer.forward, layer.backward)]
        whole = sum(parts, Cost())
        share = sum(
            max(part.flops / (whole.flops or 1), part.nbytes / (whole.nbytes or 1))
            for part in parts
        )
        pace = share / seconds
        return cls((whole.flops or 1) * pace, (whole.nbytes or 1) * pace)


def this_machine(group: Group, speeds: Sequence[Speed]) -> Machine:
    """Return a machine with one device for each rank, and a host for each container they run in.

    Ranks in different containers of one machine do not share memory: they are on different hosts.

    Links are not known: a strategy's `calibrate` adds them. Neither is how fast the hosts' memory
    is, which may be faster than the layers that are measured here, but is not slower.
    """
    memory = _memory_bytes()
    kind: Literal["cpu", "gpu"] = "gpu" if group.device.type == "cuda" else "cpu"
    places = [(member.boot_id, member.pid_namespace) for member in group.members]
    different = dict.fromkeys(places)
    names = {
        place: "this-host" if len(different) == 1 else f"host{i}"
        for i, place in enumerate(different)
    }
    slowest = min(speed.nbytes_per_s for speed in speeds)
    hosts = tuple(
        Host(
            name=name,
            cores=os.cpu_count() or 1,
            memory_bytes=memory,
            memory_bandwidth_bytes_per_s=slowest,
            source=_PROFILED,
        )
        for name in names.values()
    )
    devices = tuple(
        Device(
            name=f"{kind}{rank}",
            host=names[place],
            kind=kind,
            flops_per_s=speed.flops_per_s,
            memory_bytes=memory,
            memory_bandwidth_bytes_per_s=speed.nbytes_per_s,
            source=_PROFILED,
        )
        for rank, (place, speed) in enumerate(zip(places, speeds, strict=True))
    )
    return Machine(name="this-machine", hosts=hosts, devices=devices)


def facts(device: torch.device) -> dict[str, Any]:
    """Return what a reader of a measurement must know of the machine and the versions."""
    on_gpu = device.type == "cuda"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "instruction_sets": instruction_sets(),
        "memory_bytes": _memory_bytes(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "system": f"{platform.system()} {platform.release()}",
        "threads_per_worker": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "paceline": version("paceline"),
    }


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
