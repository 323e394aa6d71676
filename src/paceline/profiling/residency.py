"""What a worker's process holds in memory, and what is free."""

import os
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_RESET_PEAK = "5"


def held_nbytes(device: torch.device) -> int:
    """Return what this process holds: resident memory, or what PyTorch has reserved on a GPU."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return _field(_STATUS, "VmRSS")


def limited_nbytes(device: torch.device) -> int:
    """Return what of this process counts against the limit that an attempt gets."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    return _field(_STATUS, "VmData")


def forget_peak(device: torch.device) -> None:
    """Have the peak begin anew, where the kernel allows it; else it is that since the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return


def peak_nbytes(device: torch.device) -> int:
    """Return the most that this process has held since the peak was forgotten."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return _field(_STATUS, "VmHWM")


def free_nbytes(device: torch.device) -> int:
    """Return what a new process can have: of the GPU, or of this machine and this container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _field(_MEMINFO, "MemAvailable")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _field(path: Path, name: str) -> int:
    """Return a field of these files, which count in KiB; all of memory where it is not there."""
    for line in path.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
