"""Write checkpoints of a run, and resume from one.

Files of a synchronous run:

    step-00000500/               written after step 500
        model.safetensors        parameters and buffers
        optimizer.safetensors    optimizer state by parameter
        optimizer.json, schedule.json
        ranks.safetensors        by RANK/KEY: states of random generators, error feedback
        progress.json            position in the data, epochs, choices, properties of the run

Model and optimizer state, which are equal on all ranks, are saved once. A layer that is split
between ranks is saved as one tensor. All ranks save after the same step, on which they agree.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from paceline.checkpoints import json_values
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.state import random_state, restore_random_state
from paceline.checkpoints.tensor_file import Tensors, within
from paceline.checkpoints.writer import BackgroundWriter
from paceline.core.errors import Interrupted, InvalidInput
from paceline.core.settings import Interval, TrainSettings
from paceline.links.failpoints import reach
from paceline.links.group import Group
from paceline.links.interruption import Interruption, StopAgreement
from paceline.links.tensor_messages import broadcast_tensors, gather_tensors

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # subfolder of a run's folder
# With an interval in seconds, rank 0's clock decides when all ranks save. For this, all ranks meet
# about every `_MEETING_S` seconds, after a step that rank 0 has named in the previous meeting.
_MEETING_S = 1.0


class State(NamedTuple):
    """State of a run after a step, as saved in a checkpoint's files.

    `tensors`: tensors by "FILE/NAME". `parts`: contents of JSON files by "FILE". FILE is a file's
    name without its ending, such as "optimizer".
    """

    tensors: Tensors
    parts: dict[str, Any]

    def file(self, name: str) -> Tensors:
        """Return the tensors whose key begins with "name/", by the rest of the key."""
        return within(self.tensors, f"{name}/")

    def own_part(self, name: str) -> Any:
        """Return JSON file `name`; if missing (another strategy's state), raise InvalidInput."""
        if name not in self.parts:
            raise self.wrong_strategy()
        return self.parts[name]

    def wrong_strategy(self) -> InvalidInput:
        """Return the error for resuming a run with a strategy other than its own."""
        strategy = self.parts["progress"]["strategy"]
        return InvalidInput("resume", f"requires the run's strategy, {strategy}")


def read_state(settings: TrainSettings, group: Group) -> State | None:
    """Read the checkpoint of `settings.resume` on rank 0, and send it to all ranks; collective.

    Returns None without `settings.resume`. Raises InvalidInput if there is no checkpoint.
    """
    if settings.resume is None:
        return None
    found, problem = State({}, {}), None
    if group.rank == 0:
        try:
            found = _read(settings.resume)
        except InvalidInput as error:
            problem = str(error)
    group.check(problem)
    # send JSON values in Paceline's own encoding, which preserves tuples and infinity
    text = group.gather(json_values.dumps("the state", found.parts).decode())[0]
    return State(broadcast_tensors(found.tensors, group), json_values.loads(text.encode()))


def _read(run: Path) -> State:
    if not (run / CHECKPOINTS).is_dir():
        raise InvalidInput("resume", "must be a run's folder with checkpoints", got=str(run))
    loaded = CheckpointFolder(run / CHECKPOINTS).latest()
    if loaded is None:
        raise InvalidInput("resume", "has no checkpoint", got=str(run), hint="start a new run")
    for line in loaded.skipped:
        logger.warning("%s; resuming from step %d", line, loaded.step)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(loaded.written_s))
    logger.info("resuming after step %d from %s, written %s", loaded.step, loaded.path, at)
    return State(*loaded.read())


def interrupted(interruption: Interruption, num_steps: int, folder: Path | None) -> Interrupted:
    """Return the error that ends an interrupted run; `folder`: None except on rank 0."""
    more = "" if folder is None else f"; resume with paceline train --resume {folder}"
    return interruption.stopped(num_steps, more)


class Saver:
    """Writes checkpoints periodically, and when the run is interrupted; all ranks save together.

    `folder`: the run's folder on rank 0, None on other ranks. `num_steps`: steps already trained.
    """

    def __init__(
        self,
        group: Group,
        folder: Path | None,
        settings: TrainSettings,
        interruption: Interruption,
        num_steps: int,
    ) -> None:
        self._group, self._folder = group, folder
        self._interval: Interval | None = settings.checkpoint_interval
        self._interruption = interruption
        self._stop = StopAgreement(group, interruption, num_steps)
        self._writer: BackgroundWriter | None = None
        if folder is not None:
            path = folder / CHECKPOINTS
            self._writer = BackgroundWriter(CheckpointFolder(path, settings.keep_checkpoints))
        self._saved_s = self._met_s = time.monotonic()
        self._met, self._next_meeting = num_steps, num_steps + 1
        self._num_steps = num_steps

    def after(self, num_steps: int, gather: Callable[[int], State]) -> None:
        """Save the state if a checkpoint is due; raise Interrupted if the run was interrupted.

        All ranks call this method after every step. `num_steps`: number of steps trained so far.
        `gather(num_steps)`: collective; returns the state to save, complete on rank 0.
        """
        reach("step.done", worker=self._group.rank, step=num_steps)
        if self._stop.after(num_steps):
            self._save(num_steps, gather, wait=True)
            raise interrupted(self._interruption, num_steps, self._folder)
        if self._is_due(num_steps):
            self._save(num_steps, gather, wait=False)

    def close(self) -> None:
        """Wait until the background thread has written its last checkpoint."""
        if self._writer is not None:
            self._writer.close()

    def _is_due(self, num_steps: int) -> bool:
        if self._interval is None:
            return False
        if self._interval.steps is not None:
            every, before, self._num_steps = self._interval.steps, self._num_steps, num_steps
            return num_steps // every > before // every
        assert self._interval.seconds is not None
        now_s = time.monotonic()
        interval_s = self._interval.seconds
        is_due = now_s - self._saved_s >= interval_s
        if self._group.world_size == 1:
            return is_due
        if num_steps < self._next_meeting:
            return False
        # Clocks differ between ranks, so rank 0 decides whether to save and when to ask it again.
        step_s = max(1e-6, (now_s - self._met_s) / (num_steps - self._met))
        wait = max(1, int(min(_MEETING_S, interval_s) / step_s))
        is_due, wait = self._group.gather([is_due, wait])[0]
        self._met, self._met_s = num_steps, now_s
        self._next_meeting = num_steps + wait
        return bool(is_due)

    def _save(self, num_steps: int, gather: Callable[[int], State], *, wait: bool) -> None:
        state = gather(num_steps)
        self._saved_s = time.monotonic()
        if self._writer is not None:
            self._writer.save(num_steps, state.tensors, state.parts, wait=wait)


def with_ranks(
    state: State, own: Mapping[str, Tensor], values: Mapping[str, Any], group: Group
) -> State:
    """Return `state` with, on rank 0, the own states of all ranks added; collective.

    A rank's own state: its tensors `own`, JSON values `values`, and random generators.
    """
    random_tensors, random_values = random_state(group.device)
    mine = dict(own) | {f"random/{key}": one for key, one in random_tensors.items()}
    gathered = gather_tensors(mine, group)
    rows = group.gather({"random": random_values, **values})
    tensors = {
        f"ranks/{rank}/{key}": tensor
        for rank, tensors in enumerate(gathered)
        for key, tensor in tensors.items()
    }
    return State(state.tensors | tensors, state.parts | {"ranks": rows})


def of_rank(state: State, group: Group) -> tuple[Tensors, dict[str, Any]] | None:
    """Return this rank's saved tensors and JSON values; None if the number of ranks has changed."""
    rows = state.parts["ranks"]
    if len(rows) != group.world_size:
        return None
    return state.file(f"ranks/{group.rank}"), rows[group.rank]


def restore_random(state: State, group: Group) -> None:
    """Restore this rank's random generators; if the number of ranks has changed, do nothing."""
    found = of_rank(state, group)
    if found is None:
        return
    tensors, values = found
    restore_random_state(group.device, within(tensors, "random/"), values["random"])


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InvalidInput if a property of the run has another value in `now` than in `saved`."""
    for name, value in now.items():
        if saved.get(name) != value:
            problem = f"requires {name} {saved.get(name)!r}, as in the saved run"
            raise InvalidInput("resume", problem, got=value, hint="or start a new run")
