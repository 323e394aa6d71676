"""Learning-rate schedules by name, as closed-form functions of the step."""

from collections.abc import Callable
from math import cos, pi
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.core.errors import InvalidInput, first_line
from paceline.core.importing import FORM, factory_of
from paceline.core.names import did_you_mean

ScheduleFactory = Callable[[Optimizer, int], LRScheduler]

# Share of the full rate by the completed share of the steps after the warm-up.
_SHARES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


def schedule_of(name: str, warmup_steps: int) -> ScheduleFactory:
    """Return a factory for the named schedule.

    `name`: constant, cosine or linear, or "package.module:factory", which is called with the
    optimizer and the number of steps. With W `warmup_steps`, N steps in all, and t counting them
    from 0, step t has the optimizer's rate times

        (t + 1) / W                                 for t < W
        1, or (1 + cos(pi * p)) / 2, or 1 - p       afterwards, with p = (t - W) / (N - W)

    The first step has 1/W of the rate, and step W, counted from 1, all of it; the last two reach 0
    when all N steps are done. Call `step()` once after each step of the optimizer. The rate depends
    on the number of steps alone, so `last_epoch` is all that a resumed run needs.

    Raises InvalidInput if there is no schedule of that name; so does the function if the warm-up
    is not shorter than the run, the user's factory makes no schedule, or the optimizer is none of
    torch's.
    """
    if ":" in name:
        return _of_user(name, warmup_steps)
    if name not in _SHARES:
        known = tuple(_SHARES)
        raise InvalidInput(
            "schedule",
            f"{name!r} is not known{did_you_mean(name, known)} Known are {', '.join(known)}, and "
            f"your own as {FORM}",
        )
    share = _SHARES[name]

    def make(optimizer: Optimizer, num_steps: int) -> LRScheduler:
        if warmup_steps >= num_steps:
            raise InvalidInput(
                "warmup_steps",
                f"{warmup_steps}, and the run has {num_steps} steps",
                hint="the rate has to reach its full height before the last one",
            )

        # torch omits a plain function from the schedule's state, which JSON can then hold.
        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return share(min(1.0, (step - warmup_steps) / (num_steps - warmup_steps)))

        try:
            return LambdaLR(optimizer, factor)
        except TypeError as error:  # an optimizer that only resembles torch's
            raise InvalidInput("schedule", first_line(error)) from error

    return make


def _of_user(name: str, warmup_steps: int) -> ScheduleFactory:
    factory = factory_of("schedule", name)
    if warmup_steps:
        raise InvalidInput("warmup_steps", f"{name} has its own", hint="leave them at 0")
    return checked_schedule(name, factory)


def checked_schedule(name: str, factory: Callable[..., Any]) -> ScheduleFactory:
    """Wrap a scheduler factory with validation; `name` is used in errors.

    The result raises InvalidInput if the factory fails, or returns something other than a scheduler
    of torch that needs no loss.
    """

    def make(optimizer: Optimizer, num_steps: int) -> LRScheduler:
        try:
            made = factory(optimizer, num_steps)
        except Exception as error:
            raise InvalidInput("schedule", f"{name}: {first_line(error)}") from error
        if isinstance(made, ReduceLROnPlateau):
            raise InvalidInput("schedule", f"{name} follows a loss, and here it is told of steps")
        if not isinstance(made, LRScheduler):
            kind = type(made).__name__
            raise InvalidInput("schedule", f"{name} returned {kind}, not torch's LRScheduler")
        return made

    return make
