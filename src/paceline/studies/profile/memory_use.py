"""Measure the memory of a process, and of the tensors of a training step."""

from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined] # exists, but is not declared
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from paceline.links.devices import device_of
from paceline.links.shared_memory import available_nbytes
from paceline.measure.this_machine import memory_bytes

# Linux files with a process's peak memory and the cgroup's limit, which psutil does not report.
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")


def held_nbytes(device: torch.device, *, limited: bool = False) -> int:
    """Return this process's resident memory in bytes; on a GPU, the memory reserved by PyTorch.

    If `limited`, returns, for a CPU, the size of the data segment, which `limit_memory` limits.
    """
    if _has_own_memory(device):
        return torch.accelerator.memory_reserved(device)
    held = psutil.Process().memory_info()
    return int(held.data if limited else held.rss)


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `peak_nbytes` returns, if the operating system allows it."""
    if _has_own_memory(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR.write_text("5")  # makes Linux reset VmHWM, the peak


def peak_nbytes(device: torch.device) -> int:
    """Return this process's peak memory since `forget_peak`, in bytes; on a GPU, PyTorch's peak."""
    if _has_own_memory(device):
        return torch.accelerator.max_memory_reserved(device)
    rows = _STATUS.read_text().splitlines()
    kib = next((one.split()[1] for one in rows if one.startswith("VmHWM:")), None)
    return memory_bytes() if kib is None else int(kib) * 1024


def free_nbytes(device: torch.device) -> int:
    """Return the free bytes for a new process: on the GPU or, for a CPU, in this container."""
    if (memory := device_of(device).memory_nbytes()) is not None:
        return memory[0]
    free = available_nbytes()
    # If the cgroup has no limit, its file contains "max", and int() raises ValueError.
    with suppress(OSError, ValueError):
        limit, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, max(0, limit - used))
    return free


def _has_own_memory(device: torch.device) -> bool:
    return device_of(device).memory_nbytes() is not None


class Tracked(NamedTuple):
    """The peak bytes of tensors in a step, and the net bytes allocated by each operator."""

    peak_nbytes: int
    by_operator: dict[str, int]


def track(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
) -> Tracked:
    """Call `step`; return the tensors' peak bytes and the net bytes that each operator allocated.

    Before the call, gradients must be None, and the optimizer must have allocated its state.
    `batch`: pytree of the step's input tensors, which are counted although the step does not
    allocate them.
    """
    tensors = (*model.parameters(), *model.buffers(), *state_of(optimizer), *tree_leaves(batch))
    # Count each storage once, because several views may share a storage.
    storages = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, Tensor)
    }
    before = sum(storages.values())
    if _has_own_memory(device := next(model.parameters()).device):
        held = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        return Tracked(before + torch.accelerator.max_memory_allocated(device) - held, {})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    results = found.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    on_cpu = (event.nbytes() for event in changes if event.device_type() == DeviceType.CPU)
    most = max(accumulate(on_cpu, initial=0))
    by_operator = {row.key: int(row.self_cpu_memory_usage) for row in found.key_averages()}
    return Tracked(before + most, by_operator)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors of the optimizer's state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor)]


def make_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state: let it take a step with zero gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
