"""When the user's optimizers step: torch tells it of all optimizers of a process."""

import weakref
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

Stepping = Callable[[Optimizer], None]


def before_steps(method: Stepping) -> RemovableHandle:
    """Call a bound method before each step of any optimizer, as long as its object lives."""
    return register_optimizer_step_pre_hook(_weak(method))


def after_steps(method: Stepping) -> RemovableHandle:
    """Call a bound method after each step of any optimizer, as long as its object lives."""
    return register_optimizer_step_post_hook(_weak(method))


def _weak(method: Stepping) -> Callable[..., None]:
    reference = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *_: object) -> None:
        alive = reference()
        if alive is not None:
            alive(optimizer)

    return hook
