"""Registration of programs by decorators and tables (see trial.py)."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import nn

from steps import Loss, mlp, squares, trained
from trial import Program, Run, Trial

PROGRAMS: dict[str, Program] = {}


def program(**known: Any) -> Any:
    """Register a program with these fields of `Program`."""

    def register(run: Run) -> Run:
        PROGRAMS[f"{run.__module__}.{run.__name__}"] = Program(run, **known)
        return run

    return register


def trains(make: Callable[[], nn.Module], steps: int = 3, **options: Any) -> Any:
    """Register a program that gets `make()`, wrapped with `options`.

    It is a generator (trial, model), or the loss (trial, model, step) of `steps` training steps.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        def whole(trial: Trial) -> Iterator[Any]:
            model = trial.wrap(make(), **options)
            if run.__code__.co_argcount == 2:
                return run(trial, model)
            return trained(model, lambda model, step: run(trial, model, step), steps=steps)

        PROGRAMS[f"{run.__module__}.{run.__name__}"] = Program(whole)
        return run

    return register


def find(name: str) -> Program:
    """Import a program's file, and return the program; defaults apply if it is not registered."""
    file, _, own = name.partition(".")
    module = import_module(file)
    if name not in PROGRAMS:
        run = getattr(module, own)
        (program() if run.__code__.co_argcount == 1 else trains(mlp))(run)
    return PROGRAMS[name]


def programs(file: str, runs: dict[str, Run], **known: Any) -> None:
    """Register programs that are expressions, by the file's name and their own."""
    PROGRAMS.update({f"{file}.{name}": Program(run, **known) for name, run in runs.items()})


def plain(
    make: Callable[[], nn.Module],
    steps: int = 3,
    loss: Callable[[Trial], Loss] = squares,
    set_to_none: Callable[[int], bool] = lambda step: True,
    every: int = 1,
    **options: Any,
) -> Run:
    """Return a program that wraps `make()` and trains it."""
    return lambda trial: trained(
        trial.wrap(make(), **options), loss(trial), None, steps, set_to_none, every
    )
