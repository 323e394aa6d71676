"""The machine that this run is on: as a plan sees it, and as a result states it."""

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from paceline.core.machine import Device, Host, Link, Machine
from paceline.links.group import Group
from paceline.native import instruction_sets

_PROFILED = "measured by the profile of this run"


@dataclass(frozen=True)
class Reduction:
    """A measured all-reduce."""

    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Speed:
    """What the layers of the profiled model reached on a device."""

    flops_per_s: float
    nbytes_per_s: float


def this_machine(group: Group, speeds: Sequence[Speed], reductions: Sequence[Reduction]) -> Machine:
    """Return a machine with one device for each rank and links as fast as the measured all-reduces.

    `reductions` are a small and a large one, or none. A profile sees no topology: all ranks are put
    on one host, those on CPUs joined by its link with itself, GPUs in a ring.
    """
    memory = _memory_bytes()
    kind = "gpu" if group.device.type == "cuda" else "cpu"
    slowest = min(speed.nbytes_per_s for speed in speeds)
    host = Host(
        name="this-host",
        cores=os.cpu_count() or 1,
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=slowest,
        source=_PROFILED,
    )
    devices = tuple(
        Device(
            name=f"{kind}{rank}",
            host=host.name,
            kind=kind,
            flops_per_s=speed.flops_per_s,
            memory_bytes=memory,
            memory_bandwidth_bytes_per_s=speed.nbytes_per_s,
            source=_PROFILED,
        )
        for rank, speed in enumerate(speeds)
    )
    links = tuple(_links(group, devices, reductions)) if reductions else ()
    return Machine(name="this-machine", hosts=(host,), devices=devices, links=links)


def _links(
    group: Group, devices: Sequence[Device], reductions: Sequence[Reduction]
) -> Iterator[Link]:
    """Yield the links under which the cost of a ring all-reduce is what was measured.

    It sends 2 (n - 1) messages of 1/n of the bytes, one after another; n at a time share the one
    link that CPUs have. The latency is what remains of the small one when its bytes are paid.
    """
    small, large = reductions
    n, on_cpu = len(devices), group.device.type == "cpu"
    # Noise can make the larger one the faster; then its own speed is a bound.
    difference_s = max(large.seconds - small.seconds, 0.01 * large.seconds)
    seconds_per_byte = difference_s / (large.nbytes - small.nbytes)
    sent = 2 * (n - 1) / n * (n if on_cpu else 1)  # over a link, for each byte of gradients
    waiting_s = max(0.0, small.seconds - seconds_per_byte * small.nbytes)
    host = devices[0].host
    ends = [(host, host)]
    if not on_cpu:
        ends = [(devices[i].name, devices[(i + 1) % n].name) for i in range(n if n > 2 else 1)]
    for between in ends:
        yield Link(
            between=between,
            bandwidth_bytes_per_s=sent / seconds_per_byte,
            latency_s=waiting_s / (2 * (n - 1)),
            uses_cores=on_cpu and len({member.boot_id for member in group.members}) == 1,
            source=_PROFILED,
        )


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
