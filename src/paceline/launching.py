"""Carry out an order: as one of torchrun's ranks, or with workers of our own."""

import os
import sys
import time
from typing import Any
from uuid import uuid4

from paceline.core.errors import InvalidInput
from paceline.links.launch import launch
from paceline.machine_file import find_device
from paceline.plan_folder import new_plan_id
from paceline.settings import (
    RehearseSettings,
    RunSettings,
    TrainSettings,
    validated_rehearsal,
    validated_settings,
)
from paceline.training.scalars import require_tensorboard
from paceline.worker import Order, Verb, leave, work


def order(verb: Verb, values: dict[str, Any], **how: bool) -> Order:
    """Return the order to do `verb` with settings of these values; `how` are fields of `Order`.

    Raises InvalidInput that names what is wrong with a value.
    """
    settings = validated_rehearsal(values) if verb == "rehearse" else validated_settings(values)
    if isinstance(settings, RehearseSettings) and settings.device is not None:
        find_device(settings.device)
    if isinstance(settings, TrainSettings) and settings.tensorboard is not None:
        require_tensorboard()
    run_id = new_plan_id(settings.model) if verb == "plan" else new_run_id(settings)
    return Order(verb=verb, settings=settings, run_id=run_id, **how)


def new_run_id(settings: RunSettings) -> str:
    """Return a name for a run's folder that says when it was and of what."""
    what = settings.model.replace(":", ".")
    if isinstance(settings, RehearseSettings):
        what += "-rehearsed"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{uuid4().hex[:4]}"


def under_torchrun() -> bool:
    """Whether this process is already one rank of a run."""
    return "RANK" in os.environ


def carry_out(order: Order) -> None:
    """Do what is ordered.

    Raises InvalidInput or WorkerLost for what the workers could not say themselves, and
    WorkersFailed for what they have said. A rank of torchrun ends here.
    """
    if under_torchrun():
        leave(work(order))
    check_cores(order.settings.workers)
    command = [sys.executable, "-m", "paceline.worker", order.model_dump_json()]
    launch(command, order.settings.workers, order.settings.port)


def check_cores(workers: int) -> None:
    """Raise InvalidInput if so many workers cannot share the cores of this machine."""
    cores = len(os.sched_getaffinity(0))
    if workers > _MOST_PER_CORE * cores:
        raise InvalidInput(
            f"workers: {workers} do not fit on {cores} cores; at most {_MOST_PER_CORE} can share "
            "one"
        )


_MOST_PER_CORE = 4
