"""List a model's layers, and copy a model with other tensors."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.core.errors import InvalidInput

ROOT = "(root)"


@dataclass(frozen=True, eq=False)
class LayerModule:
    """A module with trainable parameters of its own.

    `name` is the module's qualified name in the model ("features.0"), or "(root)" for the model
    itself. `parameters` pairs the qualified name of each of its own trainable parameters with the
    tensor. A parameter that several modules share stands only in the first.
    """

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def layers_of(model: nn.Module) -> tuple[LayerModule, ...]:
    """Return the layers of `model` in registration order.

    Frozen parameters are left out, and a module without trainable parameters of its own is no
    layer. In a training step the layers may run in another order: `Workload.layers` has that one.
    Raises InvalidInput for parameters whose shape is not known yet (PyTorch's lazy modules).
    """
    layers: list[LayerModule] = []
    seen: set[nn.Parameter] = set()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own: list[tuple[str, nn.Parameter]] = []
        for short, parameter in module.named_parameters(recurse=False):
            if is_lazy(parameter):
                raise InvalidInput(
                    "model",
                    f"parameter {prefix + short!r} has no shape yet: run the model on one batch "
                    "first, so that its lazy modules are initialised",
                )
            if parameter.requires_grad and parameter not in seen:
                seen.add(parameter)
                own.append((prefix + short, parameter))
        if own:
            layers.append(LayerModule(name or ROOT, module, tuple(own)))
    return tuple(layers)


def duplicate(model: nn.Module, substitute: Callable[[Tensor], Tensor]) -> nn.Module:
    """Deep-copy `model`, replacing every tensor by `substitute(tensor)`.

    Shared tensors stay shared, and parameters keep being parameters, trainable or frozen as
    before. `model` itself is only read. The hooks are those of `model`, not copies: a hook may
    belong to an object that cannot be copied. Raises InvalidInput if a module cannot be copied.
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
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        name = type(model).__name__
        raise InvalidInput(name, f"cannot be copied: {type(error).__name__}: {error}") from error
