"""Requests for runs, and restarts from the last checkpoint when workers are lost."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paceline.checkpoints.folder import CheckpointFolder
from paceline.core.errors import WorkerLost
from paceline.core.settings import Record, RehearseSettings, TrainSettings
from paceline.exchange.checkpoints import CHECKPOINTS
from paceline.links.group import Group

Verb = Literal["train", "plan", "rehearse"]
_NUM_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # how often torchrun has restarted the ranks
logger = logging.getLogger(__name__)


class RunRequest(Record):
    """A training, plan or rehearsal (layers only sleep); each rank's process gets it as JSON.

    `quiet`: print no results. `as_json`, `as_markdown`: print results in this format, not as
    tables. `keep`: save a plan in a folder. `explain`: draw a step of the best plan. `lost`:
    sentences about workers that were lost in earlier attempts.
    """

    verb: Verb
    settings: Annotated[TrainSettings | RehearseSettings, Field(discriminator="kind")]
    run_id: str
    as_json: bool = False
    quiet: bool = False
    keep: bool = False
    explain: bool = False
    as_markdown: bool = False
    lost: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.settings.output / self.run_id


def resuming(request: RunRequest, folder: Path, lost: tuple[str, ...] = ()) -> RunRequest:
    """Return the request that resumes the run in `folder`; `lost` extends the request's `lost`."""
    folder = folder.absolute()
    known = {"resume": folder, "output": folder.parent}
    settings = request.settings.model_copy(update=known)
    lost = (*request.lost, *lost)
    return request.model_copy(update={"settings": settings, "run_id": folder.name, "lost": lost})


def with_restarts(attempt: Callable[[RunRequest], None], request: RunRequest) -> None:
    """Attempt a request, and restart from the last checkpoint whenever a worker is lost.

    Raises WorkerLost if a worker is lost after `max_restarts` restarts.
    """
    settings = request.settings
    num_left = settings.max_restarts if isinstance(settings, TrainSettings) else 0
    while True:
        try:
            attempt(request)
            return
        except WorkerLost as error:
            if not num_left:
                raise
            num_left -= 1
            request = restarted(request, str(error))


def restarted(request: RunRequest, why: str) -> RunRequest:
    """Return the request to resume from the last checkpoint, or to start over if none exists.

    `why`: a text that names the lost worker; it is logged, and added to the request's `lost`.
    """
    again = _from_step(request, _latest_step(request), f"{why}; restarted")
    logger.warning("%s", again.lost[-1])
    return again


def _latest_step(request: RunRequest) -> int | None:
    """Return the step of the newest valid checkpoint; None if there is no checkpoint.

    Raises InvalidInput if all checkpoints are damaged.
    """
    found = CheckpointFolder(request.folder / CHECKPOINTS).latest()
    return None if found is None else found.step


def _from_step(request: RunRequest, step: int | None, why: str) -> RunRequest:
    """Return the request that resumes after `step` (None: starts over), with `why` in `lost`."""
    if step is None:
        told = f"{why} from the beginning, because there was no checkpoint"
        return request.model_copy(update={"lost": (*request.lost, told)})
    told = f"{why} from the checkpoint after step {step:,}"
    return resuming(request, request.folder, (told,))


def restarted_by_torchrun(request: RunRequest, group: Group) -> RunRequest:
    """Return the request that resumes from the last checkpoint, if torchrun restarted the ranks.

    Otherwise returns `request`. Rank 0 looks for the checkpoint; all ranks must call this together.
    """
    num_restarts, settings = int(os.environ.get(_NUM_RESTARTS, "0")), request.settings
    is_first = isinstance(settings, TrainSettings) and settings.resume is None
    if not num_restarts or request.verb != "train" or not is_first:
        return request
    step = group.gather(_latest_step(request) if group.rank == 0 else None)[0]
    times = "once" if num_restarts == 1 else f"{num_restarts} times"
    return _from_step(request, step, f"torchrun has restarted the workers {times},")
