"""Run a request in new processes, in the ranks that torchrun started, or in this process.

Each new process is one rank and runs `main`; under torchrun each rank calls `work`. Only rank 0
prints: tables and results on standard output, progress on standard error.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.core.errors import Interrupted, InvalidInput, WorkersFailed
from paceline.core.settings import RehearseSettings, TrainSettings
from paceline.links.group import Group
from paceline.links.launch import launch
from paceline.links.processes import module_command
from paceline.links.rendezvous import check_gpus
from paceline.records.config_file import with_resumed
from paceline.records.machine_file import find_device
from paceline.records.result import RunResult, read_run
from paceline.records.settings import (
    AUTO,
    configuration,
    strategy_of,
    validated_rehearsal,
    validated_settings,
)
from paceline.report.terminal import log_to_stderr
from paceline.runs import elastic
from paceline.runs.folder import id_by_torchrun, new_id
from paceline.runs.progress import require_tensorboard
from paceline.runs.rank import as_rank, leave
from paceline.runs.restarts import RunRequest, Verb, resuming, with_restarts
from paceline.runs.session import go_through
from paceline.training.recipes.optimizers import optimizer_for, schedule_of

_MOST_PER_CORE = 4
logger = logging.getLogger(__name__)


def requested(verb: Verb, values: Mapping[str, Any], **how: bool) -> RunRequest:
    """Validate the settings of `verb`, and build the request.

    `how`: other fields of `RunRequest`. Under torchrun, `workers` defaults to the world size.
    Raises InvalidInput, which names the wrong setting.
    """
    settings: TrainSettings | RehearseSettings
    if started := os.environ.get("WORLD_SIZE"):
        values = {"workers": int(started), **values}
    if verb == "rehearse":
        settings = validated_rehearsal(values)
    else:
        settings = validated_settings(with_resumed(values, TrainSettings))
        _check_learning(settings)
    if isinstance(settings, RehearseSettings) and settings.device is not None:
        find_device(settings.device)
    if isinstance(settings, TrainSettings) and settings.tensorboard is not None:
        require_tensorboard()
    suffix = {"train": "", "rehearse": "-rehearsed", "plan": "-planned"}[verb]
    name = id_by_torchrun if under_torchrun() else new_id
    request = RunRequest(verb=verb, settings=settings, run_id=name(settings.model, suffix), **how)
    resume = settings.resume if isinstance(settings, TrainSettings) else None
    return request if resume is None else resuming(request, resume)


def _check_learning(settings: TrainSettings) -> None:
    """Raise InvalidInput, before workers start, for an unusable optimizer or schedule.

    Factories of the user (package.module:factory) are not checked: only workers import them.
    """
    if settings.optimizer is not None and ":" not in settings.optimizer:
        optimizer_for(settings)
    if settings.schedule is not None and ":" not in settings.schedule:
        schedule_of(settings.schedule, settings.warmup_steps)


def under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "RANK" in os.environ


def take_part(request: RunRequest) -> tuple[RunResult, Path]:
    """Run this rank of a request in a user's program that torchrun started.

    Returns the run's result and folder on every rank; the folder exists on rank 0's machine only.
    Raises WorkersFailed if a rank has reported an error.
    """
    _check_led(request)
    written: list[str] = []

    def go(group: Group) -> None:
        go_through(request, group)
        folder = request.folder
        own = [read_run(folder).model_dump_json(), str(folder)] if group.rank == 0 else []
        written.extend(group.gather(own)[0])

    if code := _as_rank_of(request, go):
        raise WorkersFailed(code)
    result, folder = written
    return RunResult.model_validate_json(result), Path(folder)


def carry_out(request: RunRequest) -> Path:
    """Run a request, and return the folder of the run.

    Raises WorkersFailed for an error that a worker has reported, and InvalidInput or WorkerLost for
    other errors. Under torchrun this process is a rank, so it exits instead of returning.
    """
    settings = request.settings
    if under_torchrun():
        _check_led(request)
        leave(work(request))
    if isinstance(settings, TrainSettings) and settings.elastic:
        elastic.carry_out(request)
        return request.folder
    if not _is_led(settings):
        num_workers = int(settings.workers)
        check_cores(num_workers)
        if request.verb != "rehearse":
            check_gpus(num_workers)

        def attempt(request: RunRequest) -> None:
            command = module_command("paceline.runs.launching", request.model_dump_json())
            launch(command, num_workers)

        with_restarts(attempt, request)
        return request.folder
    # A central process (hub or coordinator) leads the workers. It is this process, and starts or
    # admits the workers itself.
    if settings.listen is None:
        roles = strategy_of(settings).roles(configuration(settings))
        check_cores(sum(role.count for role in roles))
    log_to_stderr()

    def alone(request: RunRequest) -> None:
        with torch.random.fork_rng(devices=[]):  # keep the random state of the user's program
            try:
                go_through(request, Group.alone(torch.device("cpu"), settings.deadline_s))
            except Interrupted as error:
                raise WorkersFailed(error.exit_code, str(error), is_said=False) from error

    with_restarts(alone, request)
    return request.folder


def _is_led(settings: TrainSettings | RehearseSettings) -> bool:
    return settings.strategy != AUTO and strategy_of(settings).is_led


def _check_led(request: RunRequest) -> None:
    """Raise InvalidInput for strategies with a hub or coordinator, which torchrun cannot start."""
    if _is_led(request.settings):
        problem = f"{request.settings.strategy} cannot run under torchrun; start without torchrun"
        raise InvalidInput("strategy", problem)


def check_cores(processes: int) -> None:
    """Raise InvalidInput for more than four processes per core of this machine."""
    cores = len(os.sched_getaffinity(0))
    if processes > (most := _MOST_PER_CORE * cores):
        raise InvalidInput("workers", f"must be at most {most} on {cores} cores", got=processes)


def work(request: RunRequest) -> int:
    """Run this rank of a request, print an error if any, and return the exit code."""
    return _as_rank_of(request, partial(go_through, request))


def _as_rank_of(request: RunRequest, go: Callable[[Group], None]) -> int:
    settings = request.settings
    # The layers of a rehearsal only sleep, so no GPU is needed.
    device = torch.device("cpu") if request.verb == "rehearse" else None
    return as_rank(go, settings.deadline_s, device, exchanges_alone=settings.exchange_alone)


def main() -> None:
    """Run one rank of the request that `sys.argv[1]` contains as JSON."""
    leave(work(RunRequest.model_validate_json(sys.argv[1])))
