"""Copies of models in which every tensor has been replaced."""

import copy
from collections.abc import Callable

from torch import Tensor, nn

from paceline.core.errors import InvalidInput


def duplicate(model: nn.Module, substitute: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a deep copy of `model` with `substitute(tensor)` in place of every tensor.

    Shared tensors stay shared, and parameters keep being parameters, trainable or frozen as
    before. `model` itself is only read. The hooks are those of `model`, not copies: a hook may
    belong to an object that cannot be copied. Raises InvalidInput if a module cannot be copied.
    """
    memo: dict[int, object] = {}
    for module in model.modules():
        owned = (module._parameters, module._buffers, vars(module))
        for tensor in (value for values in owned for value in values.values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _replaced(tensor, substitute)
        for attribute, hooks in vars(module).items():
            if attribute.endswith("_hooks") and isinstance(hooks, dict):
                memo.update((id(hook), hook) for hook in hooks.values())
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        name = type(model).__name__
        raise InvalidInput(f"{name} cannot be copied: {type(error).__name__}: {error}") from error


def _replaced(tensor: Tensor, substitute: Callable[[Tensor], Tensor]) -> Tensor:
    new = substitute(tensor.detach())
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
