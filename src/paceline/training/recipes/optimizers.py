"""Create optimizers and learning-rate schedules by name, checked before training starts."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from math import cos, pi
from typing import Any

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from paceline.core.defaults import completed
from paceline.core.error_lines import blaming
from paceline.core.errors import InvalidInput, first_line
from paceline.core.importing import FORM, factory_of
from paceline.core.names import did_you_mean, not_known
from paceline.core.settings import TrainSettings
from paceline.training.recipes.recipe import OptimizerFactory, ScheduleFactory

_SETTING_OF = {"lr": "learning_rate", "momentum": "momentum"}  # optimizer arguments to settings
_CLOSURE = "requires a closure, which computes the loss several times in a step"
_SPARSE = "requires sparse gradients, but exchanged gradients are dense"
_ANYTHING = inspect.Parameter.VAR_KEYWORD
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, _ANYTHING)
_POSITIONS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
_PARTS = ("param_groups", "step", "zero_grad")  # attributes of an optimizer that training uses
_Fields = Mapping[str, inspect.Parameter]  # an optimizer's arguments after the model parameters
_STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
# Factor of the learning rate, as a function of the completed share of the steps after warm-up.
_SHARES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + cos(pi * done)) / 2,
    "linear": lambda done: 1 - done,
}


def optimizer_for(settings: TrainSettings) -> OptimizerFactory:
    """Return the optimizer factory that `settings` select.

    A missing setting gets the model's default (`paceline.core.defaults`).
    """
    known = completed(settings)
    assert known.optimizer is not None
    return optimizer_of(
        known.optimizer, known.learning_rate, known.momentum, known.optimizer_options
    )


def optimizer_of(
    name: str,
    learning_rate: float | None,
    momentum: float | None,
    options: Mapping[str, Any] = {},
) -> OptimizerFactory:
    """Return a function that creates the named optimizer for given parameters.

    `name`: a class of torch.optim, in upper or lower case, or a user's "package.module:factory".
    `options`: other keyword arguments of the class or factory. If `learning_rate` or `momentum` is
    None, the optimizer's default applies.

    Raises InvalidInput for an unknown name or option, or an invalid value. The returned function
    raises InvalidInput if the optimizer refuses the parameters.
    """
    is_of_user = ":" in name
    factory = factory_of("optimizer", name) if is_of_user else _of_torch(name)
    fields = _fields_of(factory)
    if "momentum" not in fields:
        momentum = momentum or None  # zero momentum is the same as no momentum
    settings = {"lr": learning_rate, "momentum": momentum}
    own: dict[str, Any] = {field: value for field, value in settings.items() if value is not None}
    for field in own:
        if field not in fields and not _takes_any(fields):
            problem = f"is not supported by optimizer {name}"
            raise InvalidInput(_SETTING_OF[field], problem, hint="omit this setting")
    given = {field: _checked(field, value, fields) for field, value in options.items()}
    for field, parameter in fields.items():
        is_needed = parameter.default is inspect.Parameter.empty and parameter.kind not in _VARIADIC
        if is_needed and field not in given | own:
            setting = _SETTING_OF.get(field, f"optimizer_options.{field}")
            raise InvalidInput(setting, f"is required by optimizer {name}")
    if given and not is_of_user:
        _try_out(factory, own, given)
    return checked_optimizer(name, lambda parameters: factory(parameters, **own, **given))


def checked_optimizer(name: str, factory: Callable[..., Any]) -> OptimizerFactory:
    """Wrap an optimizer factory with validation; `name` is used in errors.

    The returned factory raises InvalidInput if `factory` fails or returns no usable optimizer.
    """

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        with blaming("optimizer", f"{name} failed"):
            made: Optimizer = factory(parameters)
        if missing := [part for part in _PARTS if not hasattr(made, part)]:
            kind, parts = type(made).__name__, ", ".join(missing)
            raise InvalidInput("optimizer", f"{name} returned {kind}, which has no {parts}")
        if _needs_closure(type(made)):
            raise InvalidInput("optimizer", f"{name} {_CLOSURE}")
        return made

    return make


def _of_torch(name: str) -> type[Optimizer]:
    """Look up a class of torch.optim by its name in upper or lower case.

    Raises InvalidInput if the class is unknown or cannot be used.
    """
    every: dict[str, type[Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    kind = every.get(name.lower())
    if kind is None:
        hint = f"{did_you_mean(name, every)} Use a class of torch.optim, or {FORM}"
        raise InvalidInput("optimizer", "is not known", got=name, hint=hint.strip())
    if _needs_closure(kind) or kind is torch.optim.SparseAdam:
        problem = _CLOSURE if _needs_closure(kind) else _SPARSE
        raise InvalidInput("optimizer", f"{name} {problem}", hint="use another optimizer")
    return kind


def _needs_closure(kind: type[Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _fields_of(factory: Callable[..., Any]) -> _Fields:
    """Return the arguments of an optimizer factory, except the first (the model's parameters)."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except (NameError, TypeError):  # an annotation cannot be evaluated
        signature = inspect.signature(factory)
    except ValueError:  # C functions may have no signature
        return {"": inspect.Parameter("fields", _ANYTHING)}
    return dict(list(signature.parameters.items())[1:])


def _takes_any(fields: _Fields) -> bool:
    return any(one.kind is _ANYTHING for one in fields.values())


def _checked(field: str, value: Any, fields: _Fields) -> Any:
    """Check the value of an optimizer's argument `field`, and return the value.

    A list becomes a tuple if the argument's default is a tuple. Raises InvalidInput if the
    optimizer has no such argument, or if the value does not have the argument's type.
    """
    option = f"optimizer_options.{field}"
    if field in _SETTING_OF:
        raise InvalidInput(option, "is not an option", hint=f"use setting {_SETTING_OF[field]}")
    known = {key: one for key, one in fields.items() if one.kind not in (*_POSITIONS, _ANYTHING)}
    if field not in known:
        if _takes_any(fields):
            return value
        raise not_known(
            "optimizer_options", field, [key for key in known if key not in _SETTING_OF]
        )
    kind, default = known[field].annotation, known[field].default
    if isinstance(value, list) and isinstance(default, tuple):
        value = tuple(value)
    if kind is inspect.Parameter.empty or isinstance(kind, str):
        return value
    try:
        TypeAdapter(kind, config=_STRICT).validate_python(value, strict=True)
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"].replace("Input should", "must")
        raise InvalidInput(option, why, got=value) from None
    return value


def _try_out(
    factory: Callable[..., Any], own: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Create a trial optimizer; if this fails, raise InvalidInput with the refused option."""

    def refusal(fields: Mapping[str, Any]) -> str | None:
        matrix = nn.Parameter(torch.zeros(2, 2))  # some optimizers accept only matrices
        try:
            factory([matrix], **own, **fields)
        except Exception as error:  # torch raises various errors for invalid values
            return first_line(error).partition(": ")[2]
        return None

    together = refusal(options)
    if together is None:
        return
    for field, value in options.items():
        if alone := refusal({field: value}):
            raise InvalidInput(f"optimizer_options.{field}", alone, got=value)
    raise InvalidInput("optimizer_options", together, got=dict(options))


def schedule_of(name: str, warmup_steps: int) -> ScheduleFactory:
    """Return a function that creates the named schedule for an optimizer and a number of steps.

    `name`: constant, cosine or linear, or a user's "package.module:factory". The user's factory is
    called with the optimizer and the number of steps.

    Let t = 0, ..., N - 1 be the steps of the run, and W = `warmup_steps`. While t < W, the built-in
    schedules multiply the learning rate by (t + 1) / W. Then, with p = (t - W) / (N - W), the
    factor is 1 (constant), (1 + cos(pi * p)) / 2 (cosine), or 1 - p (linear).

    Raises InvalidInput for an unknown name. The returned function raises InvalidInput if the
    warm-up is not shorter than the run, or if creating the schedule fails.
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

        # Use a plain function: torch omits it from the schedule's state, which then fits into JSON.
        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / warmup_steps
            return share(min(1.0, (step - warmup_steps) / (num_steps - warmup_steps)))

        with blaming("schedule", f"{name} failed"):  # LambdaLR requires a torch Optimizer
            return LambdaLR(optimizer, factor)

    return make


def checked_schedule(name: str, factory: Callable[..., Any]) -> ScheduleFactory:
    """Wrap a scheduler factory with validation; `name` is used in errors.

    The returned factory raises InvalidInput if `factory` fails, or does not return an LRScheduler
    that depends only on the step.
    """

    def make(optimizer: Optimizer, num_steps: int) -> LRScheduler:
        with blaming("schedule", f"{name} failed"):
            made = factory(optimizer, num_steps)
        if isinstance(made, ReduceLROnPlateau):
            raise InvalidInput("schedule", f"{name} returned ReduceLROnPlateau, which needs a loss")
        if not isinstance(made, LRScheduler):
            kind = type(made).__name__
            raise InvalidInput("schedule", f"{name} returned {kind}, not torch's LRScheduler")
        return made

    return make
