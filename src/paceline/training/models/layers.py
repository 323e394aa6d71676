"""List a model's layers; copy a model and replace its tensors."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.error_lines import blaming
from paceline.core.errors import InvalidInput

ROOT = "(root)"


@dataclass(frozen=True, eq=False)
class LayerModule:
    """A module that directly owns trainable parameters.

    `name`: qualified name in the model ("features.0"), or "(root)" for the model itself.
    `parameters`: its trainable parameters with their qualified names. A parameter shared by several
    modules belongs to the first of these modules only.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def require_trainable(name: str, built: Any) -> nn.Module:
    """Return `built`, a factory's result; raise InvalidInput unless it is a trainable module."""
    if not isinstance(built, nn.Module):
        raise InvalidInput(name, f"returned {type(built).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise InvalidInput(name, "has no trainable parameters")
    return built


def layers_of(model: nn.Module) -> tuple[LayerModule, ...]:
    """Return the layers of `model` in registration order; frozen parameters are left out.

    `Workload.layers` has the order of the forward pass, which may differ. Raises InvalidInput for
    lazy modules whose parameters have no shapes yet.
    """
    layers: list[LayerModule] = []
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own: list[tuple[str, nn.Parameter]] = []
        for short, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                problem = f"has the uninitialised lazy parameter {prefix + short!r}"
                raise InvalidInput("model", problem, hint="run the model on one batch first")
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                own.append((prefix + short, parameter))
        if own:
            layers.append(LayerModule(name or ROOT, module, tuple(own)))
    return tuple(layers)


def duplicate(model: nn.Module, substitute: Callable[[Tensor], Tensor]) -> nn.Module:
    """Deep-copy `model`, replacing every tensor by `substitute(tensor)`.

    Shared tensors stay shared, and frozen parameters stay frozen. The copy uses the same hook
    objects, because a hook may belong to an object that cannot be copied. Raises InvalidInput if
    copying fails.
    """
    memo: dict[int, object] = {}
    for module in model.modules():
        owned = (module._parameters, module._buffers, vars(module))
        for tensor in (value for values in owned for value in values.values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                new = substitute(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        for attribute, hooks in vars(module).items():
            if attribute.endswith("_hooks") and isinstance(hooks, dict):
                memo.update((id(hook), hook) for hook in hooks.values())
    with blaming(type(model).__name__, "cannot be copied"):
        return copy.deepcopy(model, memo)


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; a meta tensor becomes zeros."""
    if device.type == "meta":
        return torch.empty_like(tensor, device=device)
    if tensor.is_meta:
        return torch.zeros_like(tensor, device=device)
    return tensor.detach().to(device, copy=True)
