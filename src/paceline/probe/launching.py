"""Order a probe, and carry it out: as one of torchrun's ranks, or with workers of our own."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from paceline.core.errors import InvalidInput
from paceline.launching import under_torchrun
from paceline.links.launch import launch
from paceline.probe.machine import name_from
from paceline.probe.rank import Order, check_output, work
from paceline.settings import validated
from paceline.worker import leave

_MOST_BY_DEFAULT = 2


def order(workers: int | None, output: Path | None, **values: Any) -> Order:
    """Return the order of a probe; InvalidInput names what is wrong with a value.

    Without `workers` they are those of torchrun, or as many as there are GPUs, or else cores, but
    not more than two. Without `output` the file is named after this computer.
    """
    values["workers"] = _default_workers() if workers is None else workers
    values["output"] = output or Path(f"{name_from(platform.node().partition('.')[0])}.toml")
    wanted: Order = validated(TypeAdapter(Order), values)
    _check_workers(wanted.workers)
    return wanted


def _default_workers() -> int:
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return torch.cuda.device_count() or min(_MOST_BY_DEFAULT, _num_cores())


def _check_workers(workers: int) -> None:
    if under_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if workers != started:
            raise InvalidInput(f"workers: {workers} asked for, {started} started")
        return
    cores, gpus = _num_cores(), torch.cuda.device_count()
    if workers > max(cores, gpus):
        raise InvalidInput(
            f"workers: {workers} do not fit on {cores} cores and {gpus} GPUs; "
            "each is a device of the file, which is one GPU, or one or more cores"
        )


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def carry_out(order: Order) -> None:
    """Do what is ordered.

    Raises InvalidInput or WorkerLost for what the workers could not say themselves, and
    WorkersFailed for what they have said. A rank of torchrun ends here.
    """
    if under_torchrun():
        leave(work(order))
    check_output(order)
    launch([sys.executable, "-m", "paceline.probe.rank", order.model_dump_json()], order.workers)
