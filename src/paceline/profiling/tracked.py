"""What tensors take during a step, as PyTorch's own allocator counts it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

_MEMORY = "[memory]"


class Tracked(NamedTuple):
    """The most bytes of tensors at once, and by operator what it took and did not give back."""

    peak_nbytes: int
    by_operator: dict[str, int]


def track(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, ...],
) -> Tracked:
    """Take a step and return the most that tensors took: the model's, the optimizer's, all others.

    Gradients must be gone and the optimizer's state be there: take a step before. `batch` is what
    the step trains on, which was made before it, too.
    """
    before = _nbytes((*model.parameters(), *model.buffers(), *_state(optimizer), *batch))
    device = next(model.parameters()).device
    if device.type == "cuda":
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return Tracked(before + torch.cuda.max_memory_allocated(device) - held, {})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    return Tracked(before + _most_taken(found), _by_operator(found))


def momentum_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer make its state, by an update with gradients of zero."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


def _nbytes(tensors: tuple[Tensor, ...]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _most_taken(found: profile) -> int:
    """Return the most that was taken at once since the profile began.

    Each event says what the allocator holds after it. Memory that was taken earlier is not known to
    it, nor when that is given back.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == _MEMORY]
    memory.sort(key=lambda event: event["ts"])
    on_cpu = [event["args"] for event in memory if event["args"].get("Device Type") == 0]
    if not on_cpu:
        return 0
    start = on_cpu[0]["Total Allocated"] - on_cpu[0]["Bytes"]
    return max(int(args["Total Allocated"]) for args in on_cpu) - int(start)


def _by_operator(found: profile) -> dict[str, int]:
    return {row.key: int(row.self_cpu_memory_usage) for row in found.key_averages()}
