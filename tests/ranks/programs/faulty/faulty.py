"""Programs that deliberately differ between DDP and Paceline (see test_programs.py)."""

from collections.abc import Iterator
from typing import Any

from steps import mlp, squares, trained
from trial import Trial


def differs_in_the_second_step(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    for number, seen in enumerate(trained(model, squares(trial))):
        if number == 1 and trial.rank == 1 and not trial.is_torch:
            model.module[0].bias.grad[0] += 1e-6
        yield seen


def draws_a_number_too_many(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    if not trial.is_torch:
        mlp()
    yield from trained(model, squares(trial))


def runs_forward_once_too_often(trial: Trial) -> Iterator[Any]:
    model = trial.wrap(mlp())
    if not trial.is_torch:
        model(trial.batch(0))
    yield from trained(model, squares(trial))


def raises_where_ddp_does_not(trial: Trial) -> Iterator[Any]:
    yield from trained(trial.wrap(mlp()), squares(trial))
    if not trial.is_torch:
        raise ValueError("of ours alone")
