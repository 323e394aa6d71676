"""What files of programs say of them: see trial.py."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from torch import nn

from steps import Loss, mlp, squares, trained
from trial import Program, Run, Trial

PROGRAMS: dict[str, Program] = {}


def program(**known: Any) -> Any:
    """Say what is known of a program."""

    def register(run: Run) -> Run:
        PROGRAMS[f"{run.__module__}.{run.__name__}"] = Program(run, **known)
        return run

    return register


def trains(make: Callable[[], nn.Module], steps: int = 3, **options: Any) -> Any:
    """Say that a program is given a model of this kind, which is parallel."""

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
    """A function of a file of programs, or what it has said of one."""
    file, _, own = name.partition(".")
    module = import_module(file)
    if name not in PROGRAMS:
        run = getattr(module, own)
        (program() if run.__code__.co_argcount == 1 else trains(mlp))(run)
    return PROGRAMS[name]


def programs(file: str, runs: dict[str, Run], **known: Any) -> None:
    """Register programs of one expression, by the name of their file and their own."""
    PROGRAMS.update({f"{file}.{name}": Program(run, **known) for name, run in runs.items()})


def plain(
    make: Callable[[], nn.Module],
    steps: int = 3,
    loss: Callable[[Trial], Loss] = squares,
    **options: Any,
) -> Run:
    """A program that only trains a model of this kind."""
    return lambda trial: trained(trial.wrap(make(), **options), loss(trial), steps=steps)
