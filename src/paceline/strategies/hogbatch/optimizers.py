"""The optimizer of a worker: any of torch's by name, or one of the user's own."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.errors import InvalidInput

_NEEDS_CLOSURE = ("LBFGS",)
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizer_of(name: str, learning_rate: float, momentum: float) -> Make:
    """Return what makes an optimizer of parameters.

    `name` is that of one in torch.optim, in any case, or "package.module:factory", which is called
    with the parameters and lr. Its state is the worker's own, and it has to update the parameters
    in place, without another forward pass. InvalidInput if there is none, or it has no momentum and
    one is given.
    """
    factory = _of_user(name) if ":" in name else _of_torch(name)
    options: dict[str, Any] = {"lr": learning_rate}
    if momentum:
        if "momentum" not in inspect.signature(factory).parameters:
            raise InvalidInput(f"momentum: optimizer {name} has none; leave it at 0")
        options["momentum"] = momentum
    return lambda parameters: factory(parameters, **options)


def _of_torch(name: str) -> Callable[..., torch.optim.Optimizer]:
    known: dict[str, Callable[..., torch.optim.Optimizer]] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and key not in _NEEDS_CLOSURE
    }
    if name.lower() in known:
        return known[name.lower()]
    close = get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise InvalidInput(
        f"optimizer: {name!r} is not one that can be used; {hint}Known are "
        f"{', '.join(sorted(known))}, and your own as package.module:factory"
    )


def _of_user(name: str) -> Callable[..., torch.optim.Optimizer]:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise InvalidInput(f"optimizer: {name!r} cannot be imported: {error}") from error
    if not callable(factory):
        raise InvalidInput(f"optimizer: {name!r} is nothing that can be called")
    made: Callable[..., torch.optim.Optimizer] = factory
    return made
