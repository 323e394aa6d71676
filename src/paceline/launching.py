"""Carry out an order: as one of torchrun's ranks, or with workers of our own."""

import os
import sys
import time
from typing import Any
from uuid import uuid4

from paceline.core.errors import InvalidInput
from paceline.links.launch import launch
from paceline.machine_file import find_device
from paceline.settings import (
    RehearseSettings,
    RunSettings,
    validated_rehearsal,
    validated_settings,
)
from paceline.worker import Order, Verb, leave, work


def order(verb: Verb, values: dict[str, Any], **how: bool) -> Order:
    """Return the order to do `verb` with settings of these values; `how` are fields of `Order`.

    Raises InvalidInput that names what is wrong with a value.
    """
    settings = validated_rehearsal(values) if verb == "rehearse" else validated_settings(values)
    if isinstance(settings, RehearseSettings) and settings.device is not None:
        find_device(settings.device)
    return Order(verb=verb, settings=settings, run_id=_new_run_id(settings), **how)


def _new_run_id(settings: RunSettings) -> str:
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
    cores = len(os.sched_getaffinity(0))
    if order.settings.workers > _MOST_PER_CORE * cores:
        raise InvalidInput(
            f"workers: {order.settings.workers} do not fit on {cores} cores; "
            f"at most {_MOST_PER_CORE} can share one"
        )
    command = [sys.executable, "-m", "paceline.worker", order.model_dump_json()]
    launch(command, order.settings.workers, order.settings.port)


_MOST_PER_CORE = 4
