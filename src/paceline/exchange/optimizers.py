"""When the user's optimizers step: torch tells it of all optimizers of a process."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

Stepping = Callable[[Optimizer], None]


def before_steps(method: Stepping) -> RemovableHandle:
    """Call a bound method before each step of any optimizer, as long as its object lives."""
    return _until_gone(method, register_optimizer_step_pre_hook(_weak(method)))


def before_updates(method: Stepping) -> RemovableHandle:
    """Call a bound method before each update of any optimizer, as long as its object lives.

    That is before the step, or each time its closure has computed gradients.
    """
    alive = _weak(method)

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            alive(optimizer)
            return None

        def computed() -> Any:
            loss = closure()
            alive(optimizer)
            return loss

        if "closure" in kwargs:
            return args, kwargs | {"closure": computed}
        return (args[0], computed, *args[2:]), kwargs

    return _until_gone(method, register_optimizer_step_pre_hook(hook))


def after_steps(method: Stepping) -> RemovableHandle:
    """Call a bound method after each step of any optimizer, as long as its object lives."""
    return _until_gone(method, register_optimizer_step_post_hook(_weak(method)))


def _until_gone(method: Stepping, handle: RemovableHandle) -> RemovableHandle:
    """Have the hook end with the method's object: torch would call it in every step for good."""
    owner = method.__self__  # type: ignore[attr-defined] # it is bound
    end = weakref.finalize(owner, handle.remove)
    end.atexit = False
    return handle


def _weak(method: Stepping) -> Callable[..., None]:
    reference = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *_: object) -> None:
        alive = reference()
        if alive is not None:
            alive(optimizer)

    return hook
