"""Create learning-rate schedules by name, as closed-form functions of the step number."""

from collections.abc import Callable
from math import cos, pi
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.core.errors import InvalidInput, first_line
from paceline.core.importing import FORM, factory_of
from paceline.core.names import not_known
from paceline.training.recipes.recipe import ScheduleFactory

# Factors of the learning rate, by the completed share of the steps after warm-up.
_SHARES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


def schedule_of(name: str, warmup_steps: int) -> ScheduleFactory:
    """Return a factory for the named schedule.

    `name`: constant, cosine or linear, or a user's "package.module:factory". The user's factory is
    called with the optimizer and the number of steps.

    Let W be `warmup_steps`, and N the number of steps. The schedules constant, cosine and linear
    multiply the optimizer's rate in step t = 0, 1, ... by

        (t + 1) / W                                 for t < W
        1                                           afterwards, if constant
        (1 + cos(pi * p)) / 2                       afterwards, if cosine
        1 - p                                       afterwards, if linear

    with p = (t - W) / (N - W).

    Call the schedule's `step()` once after each step of the optimizer. The rate depends on the
    number of steps alone, so a resumed run only needs `last_epoch`.

    Raises InvalidInput for an unknown name. The factory raises InvalidInput if the warm-up is not
    shorter than the run, or if creating the schedule fails.
    """
    if ":" in name:
        if warmup_steps:
            raise InvalidInput("warmup_steps", f"is not supported by {name}", hint="use 0")
        return checked_schedule(name, factory_of("schedule", name))
    if name not in _SHARES:
        raise not_known("schedule", name, _SHARES, f", or {FORM}")
    share = _SHARES[name]

    def make(optimizer: Optimizer, num_steps: int) -> LRScheduler:
        if warmup_steps >= num_steps:
            problem = f"must be less than the {num_steps} steps of the run"
            raise InvalidInput("warmup_steps", problem, got=warmup_steps)

        # torch omits a plain function from the schedule's state, so this state fits into JSON.
        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return share(min(1.0, (step - warmup_steps) / (num_steps - warmup_steps)))

        try:
            return LambdaLR(optimizer, factor)
        except TypeError as error:  # an optimizer that only resembles torch's
            raise InvalidInput("schedule", first_line(error)) from error

    return make


def checked_schedule(name: str, factory: Callable[..., Any]) -> ScheduleFactory:
    """Wrap a scheduler factory with validation; `name` is used in errors.

    The result raises InvalidInput if the factory fails, or does not return a scheduler of
    torch that depends on the step alone.
    """

    def make(optimizer: Optimizer, num_steps: int) -> LRScheduler:
        try:
            made = factory(optimizer, num_steps)
        except Exception as error:
            raise InvalidInput("schedule", f"{name}: {first_line(error)}") from error
        if isinstance(made, ReduceLROnPlateau):
            raise InvalidInput("schedule", f"{name} returned ReduceLROnPlateau, which needs a loss")
        if not isinstance(made, LRScheduler):
            kind = type(made).__name__
            raise InvalidInput("schedule", f"{name} returned {kind}, not torch's LRScheduler")
        return made

    return make
