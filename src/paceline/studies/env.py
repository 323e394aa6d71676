"""Describe this machine, and find causes of slow training, for a bug report."""

import os
from collections.abc import Iterator
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch.utils import collect_env

from paceline.core.errors import InvalidInput
from paceline.core.settings import Record
from paceline.links.devices import device_of, gpus
from paceline.native import instruction_sets

_CGROUP = Path("/sys/fs/cgroup/cpu.max")  # the container's CPU quota, which psutil does not report
_BUSY_SHARE = 0.25  # warn if the load exceeds this fraction of the cores
_SLOW_NETWORK_BIT_PER_S = 2.5e9
_EXAMPLE_BITS = 100e6 * 32  # float32 gradients of 100 million parameters


class Machine(Record):
    """Facts about this machine, in which `slow_parts` looks for causes of slow training.

    `cores`: number of cores that this process may use. `quota`: number of processors that the
    cgroup allows, or None without a limit. `load`: number of runnable processes, averaged over a
    minute. `torch_capability`: instruction set that torch uses. `kernels`: instruction sets that
    Paceline's kernels use. `apart`: pairs of GPUs (by index) without peer access. `unusable_gpus`:
    error message if the GPUs cannot be used. `networks`: speed of each network interface whose
    speed is known, in bit/s.
    """

    cores: int
    quota: float | None
    load: float
    torch_capability: str
    kernels: tuple[str, ...]
    free_nbytes: int
    memory_nbytes: int
    apart: tuple[tuple[int, int], ...]
    unusable_gpus: str | None
    networks: dict[str, float]


class Slow(NamedTuple):
    """A cause of slow training (`what`) with its effect (`why`) and a remedy (`instead`)."""

    code: str
    what: str
    why: str
    instead: str


def examine() -> Machine:
    """Collect the facts about this machine; initialises CUDA if there are GPUs."""
    why, found = None, tuple[torch.device, ...]()
    try:
        found = gpus()
    except InvalidInput as error:
        why = str(error)
    memory = psutil.virtual_memory()
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        quota=_quota(),
        load=max(0.0, psutil.getloadavg()[0]),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        kernels=tuple(instruction_sets()),
        free_nbytes=memory.available,
        memory_nbytes=memory.total,
        apart=tuple(
            (i, j)
            for (i, one), (j, other) in combinations(enumerate(found), 2)
            if not device_of(one).reaches(other)
        ),
        unusable_gpus=why,
        networks={
            name: 1e6 * one.speed
            for name, one in psutil.net_if_stats().items()
            if one.isup and one.speed > 0
        },
    )


def _quota() -> float | None:
    """Return the number of processors that the cgroup allows; None without a limit."""
    try:
        most_us, period_us = map(float, _CGROUP.read_text().split())
    except (OSError, ValueError):  # no file, or no limit ("max")
        return None
    return most_us / period_us


def slow_parts(found: Machine) -> Iterator[Slow]:
    """Yield the causes of slow training that the facts about a machine show."""
    yield from _slow_cores(found)
    if found.unusable_gpus is not None:
        yield Slow(
            "gpu",
            "a GPU cannot be used",
            found.unusable_gpus,
            "fix the cause, or hide the GPU with CUDA_VISIBLE_DEVICES=",
        )
    if pairs := ", ".join(f"{i}-{j}" for i, j in found.apart):
        yield Slow(
            "peer_memory",
            f"GPUs have no access to each other's memory: {pairs}",
            "they exchange through the host's memory",
            "try --strategy host, which sums there; `paceline plan` predicts the gain",
        )
    for name, bit_per_s in found.networks.items():
        if bit_per_s < _SLOW_NETWORK_BIT_PER_S:
            yield Slow(
                "network",
                f"network {name} has {bit_per_s / 1e9:g} Gbit/s",
                "between two machines, gradients of 100 million parameters take at least "
                f"{_EXAMPLE_BITS / bit_per_s:.2g} s a step",
                "--codec dynamic8 sends a quarter; --strategy local exchanges once in many steps",
            )


def _slow_cores(found: Machine) -> Iterator[Slow]:
    if found.load > _BUSY_SHARE * found.cores:
        yield Slow(
            "busy",
            f"{found.load:.1f} processes compete for {found.cores} cores",
            "all workers wait for the slowest one, and measurements are noisy",
            "stop other programs, or leave them some cores with fewer --workers",
        )
    if found.quota is not None and found.quota < found.cores:
        yield Slow(
            "quota",
            f"only {found.quota:g} of {found.cores} visible cores may be used at a time",
            "the container's limit (cgroup) suspends workers that use more processor time",
            f"raise the container's limit, or use at most {max(1, int(found.quota))} workers",
        )
    capability = found.torch_capability.lower()
    if capability.startswith("avx") and capability not in found.kernels:
        yield Slow(
            "kernels",
            f"torch uses {found.torch_capability} instructions, but Paceline's kernels do not",
            "codecs and sums are slower",
            "install a wheel for this processor, or build Paceline on this machine",
        )


def report() -> dict[str, Any]:
    """Return the data of a bug report: versions, machine and causes of slow training."""
    found = examine()
    return {
        "paceline": version("paceline"),
        "torch": collect_env.get_env_info()._asdict(),
        "machine": found.model_dump(mode="json"),
        "slow": [one._asdict() for one in slow_parts(found)],
    }


def page(found: dict[str, Any]) -> str:
    """Format the result of `report` as text."""
    machine = Machine.model_validate(found["machine"])
    free, whole = (one / 2**30 for one in (machine.free_nbytes, machine.memory_nbytes))
    slow = [f"{one['what']}: {one['why']}. Instead: {one['instead']}." for one in found["slow"]]
    rows = [
        f"Paceline {found['paceline']}, kernels: {', '.join(machine.kernels)}",
        f"Cores: {machine.cores}, load {machine.load:.1f}; memory: {free:.1f} of {whole:.1f} GiB",
        "",
        collect_env.pretty_str(collect_env.SystemEnv(**found["torch"])),
        "",
        "Causes of slow training:",
        *(f"- {one}" for one in slow or ["none found"]),
    ]
    return "\n".join(rows)
