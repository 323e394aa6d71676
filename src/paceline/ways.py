"""The ways in which the ranks of a run go through it: one for whole replicas, one for a split head.

A way is what they do one after another, all ranks each together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import runs, subbatch_rehearsal, subbatch_run
from paceline.planner import Forecast
from paceline.rehearsal import prediction, setup, steps
from paceline.rehearsal.steps import Rehearsal
from paceline.result import Result


@dataclass(frozen=True)
class Way:
    """What ranks do: what `build` returns is the first argument of all others.

    `save` gets the run's folder on rank 0, and None on the others.
    """

    build: Callable[..., Any]
    profile: Callable[..., Any]
    plan: Callable[..., list[Forecast]]
    train: Callable[..., Any]
    result: Callable[..., Result]
    save: Callable[[Any, Path | None], None]


_WHOLE = Way(
    runs.build,
    runs.profile_here,
    runs.plan_here,
    runs.train_here,
    runs.result_of,
    runs.save_here,
)
_SPLIT = Way(
    subbatch_run.build,
    subbatch_run.profile_here,
    subbatch_run.plan_here,
    subbatch_run.train_here,
    subbatch_run.result_of,
    subbatch_run.save_here,
)


def way_of(strategy: str) -> Way:
    """Return the way of a strategy."""
    return _SPLIT if strategy == "subbatch" else _WHOLE


@dataclass(frozen=True)
class RehearsalWay:
    """What ranks of a rehearsal do: what `build` returns is the first argument of the others."""

    build: Callable[..., Any]
    measure: Callable[..., Any]
    rehearse: Callable[..., Rehearsal]


_WHOLE_REHEARSED = RehearsalWay(setup.build, prediction.measure, steps.rehearse)
_SPLIT_REHEARSED = RehearsalWay(
    subbatch_rehearsal.build, subbatch_rehearsal.measure, subbatch_rehearsal.rehearse
)


def rehearsed_by(strategy: str) -> RehearsalWay:
    """Return the way in which a strategy is rehearsed."""
    return _SPLIT_REHEARSED if strategy == "subbatch" else _WHOLE_REHEARSED
