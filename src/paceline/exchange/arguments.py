"""What DistributedDataParallel's arguments mean before it has looked at them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

# Arguments of DistributedDataParallel that only torch's own reducer can fulfil, and why.
OF_TORCH_ALONE = {
    "mixed_precision": "casts parameters in hooks of torch's reducer; use torch.autocast",
    "delay_all_reduce_named_params": "hands gradients to buckets of torch's reducer",
    "param_to_hook_all_reduce": "hands gradients to buckets of torch's reducer",
}


def process_group_of(arguments: dict[str, Any]) -> dist.ProcessGroup | None:
    """Return the group that the arguments name; None is torch's default group."""
    mesh, group = arguments.get("device_mesh"), arguments.get("process_group")
    if mesh is not None and group is None and mesh.ndim == 1:
        group = mesh.get_group(mesh_dim=0)
    result: dist.ProcessGroup | None = group
    return result


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter."""
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device


def sends_buffers(arguments: dict[str, Any]) -> bool:
    """Return whether buffers become rank 0's when the module is made parallel."""
    if arguments.get("forward_sync_buffers") is not None:
        return True
    return arguments.get("broadcast_buffers") in (None, True)


def is_checked(module: nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether ranks' models are compared: DistributedDataParallel refuses some itself."""
    parameters = list(module.parameters())
    is_refused = any(is_lazy(p) for p in parameters) or not any(p.requires_grad for p in parameters)
    return bool(arguments.get("init_sync", True)) and not is_refused
