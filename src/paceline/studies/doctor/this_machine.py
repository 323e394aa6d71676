"""Examine this machine: versions, cores, links, pinned memory, compilers and instruction sets."""

import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from paceline.core.errors import InvalidInput
from paceline.devices import device_of, gpus
from paceline.links.cores import physical_cores
from paceline.measure.this_machine import memory_bytes
from paceline.native import _native, instruction_sets
from paceline.studies.doctor.examination import Examination, Gpu, Network

_PACKAGES = (
    *("paceline", "torch", "numpy", "pydantic", "typer", "rich", "jinja2", "safetensors", "pyzmq"),
    *("triton", "scikit-learn", "lightning", "accelerate", "transformers"),
)
_COMPILERS = re.compile(rb"GCC: \([^)\0]*\) [0-9.]+|clang version [0-9.]+")
_CPU, _NET = Path("/sys/devices/system/cpu"), Path("/sys/class/net")
_CGROUP = Path("/sys/fs/cgroup/cpu.max")
_MIB = 1 << 20


def examine() -> Examination:
    """Examine this machine; CUDA is initialised where there are GPUs."""
    usable = os.sched_getaffinity(0)
    devices, why = _usable_gpus()
    cpu = _fields(Path("/proc/cpuinfo"))
    return Examination(
        versions=_versions(),
        built=_compilers(),
        processor=cpu.get("model name", platform.machine()),
        cores=len(usable),
        physical_cores=len(physical_cores(usable)),
        all_cores=os.cpu_count() or 1,
        quota=_quota(),
        load=max(0.0, os.getloadavg()[0]),
        instruction_sets=tuple(cpu.get("flags", "").split()),
        used_instruction_sets=tuple(instruction_sets()),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        asked_threads=os.environ.get("OMP_NUM_THREADS"),
        memory_nbytes=memory_bytes(),
        free_nbytes=1024 * int(_fields(Path("/proc/meminfo"))["MemAvailable"].split()[0]),
        governor=_text(_CPU / "cpu0/cpufreq/scaling_governor"),
        networks=_networks(),
        gpus=_gpus(devices),
        unusable_gpus=why,
        pinned=_can_pin(devices[0]) if devices else None,
    )


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda is not None:
        found["CUDA of torch"] = torch.version.cuda
    return found | {
        platform.system(): platform.release(),
        "C library": "-".join(platform.libc_ver()),
    }


def _compilers() -> dict[str, str]:
    """Return what built Paceline's C++ part and torch, as their files say."""
    named = _COMPILERS.findall(Path(_native.__file__).read_bytes())
    lines = [line.strip(" -") for line in torch.__config__.show().splitlines()]
    of_torch = next((one for one in lines if one.startswith(("GCC", "clang"))), "not said")
    own = ", ".join(dict.fromkeys(one.decode() for one in named)) or "not said"
    return {"Paceline": own, "torch": of_torch}


def _fields(path: Path) -> dict[str, str]:
    """Return the fields of a file of lines such as "name: value", each as it stands first."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _quota() -> float | None:
    """Return the processors that the control group may use at a time; None without a limit."""
    text = _text(_CGROUP)
    if text is None or text.startswith("max"):
        return None
    most_us, period_us = map(float, text.split())
    return most_us / period_us


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _networks() -> tuple[Network, ...]:
    """Return the interfaces that are up, but loopback."""
    found = []
    for path in sorted(_NET.iterdir()):
        if path.name == "lo" or _text(path / "operstate") == "down":
            continue
        speed, mtu = _text(path / "speed"), _text(path / "mtu")
        mbit_per_s = float(speed) if speed else -1.0
        bit_per_s = 1e6 * mbit_per_s if mbit_per_s > 0 else None
        found.append(Network(name=path.name, bit_per_s=bit_per_s, mtu=int(mtu or 0)))
    return tuple(found)


def _usable_gpus() -> tuple[tuple[torch.device, ...], str | None]:
    try:
        return gpus(), None
    except InvalidInput as error:
        return (), str(error)


def _gpus(found: tuple[torch.device, ...]) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            name=device_of(one).name,
            memory_nbytes=memory.total_nbytes,
            reaches=tuple(
                number
                for number, other in enumerate(found)
                if other != one and device_of(one).reaches(other)
            ),
        )
        for one in found
        if (memory := device_of(one).memory) is not None
    )


def _can_pin(gpu: torch.device) -> bool:
    try:
        device_of(gpu).pinned_like(torch.empty(_MIB, dtype=torch.uint8))
    except InvalidInput:
        return False
    return True
