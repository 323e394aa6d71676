"""Checkpoints of a hogbatch run: written in pauses between batches, and on Ctrl-C.

model.safetensors      the shared model
workers.safetensors    each worker's optimizer and random numbers, as far as they are alike
log.safetensors        the batches so far
hogbatch.json          the samples that are left, the counts, the workers
"""

import time
from collections.abc import Callable
from typing import Any

from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.writer import BackgroundWriter
from paceline.core.errors import InvalidInput
from paceline.core.settings import TrainSettings
from paceline.exchange.checkpoints import CHECKPOINTS, State, check_same_run, interrupted
from paceline.exchange.session import TrainingSession
from paceline.links.interruption import Interruption

PART = "hogbatch"
Saved = tuple[dict[str, Any], dict[str, Any]]  # tensors by FILE/NAME, and plain values


class Checkpoints:
    """Pauses the coordinator when a checkpoint is due, and writes it; ends the run on Ctrl-C.

    `state` is called in a pause. A step is as many samples as the batch size.
    """

    def __init__(
        self,
        session: TrainingSession,
        settings: TrainSettings,
        interruption: Interruption,
        state: Callable[[], Saved],
        num_samples: int,
    ) -> None:
        self._session, self._settings, self._state = session, settings, state
        self._interruption, self._interval = interruption, settings.checkpoint_interval
        folder = CheckpointFolder(session.folder / CHECKPOINTS, settings.keep)
        self._writer = BackgroundWriter(folder)
        self._saved_s, self._saved = time.monotonic(), self._step_of(num_samples)
        self._num_samples = num_samples

    def is_due(self, num_samples: int) -> bool:
        """Return True if a checkpoint is to be written now, or the run was asked to stop."""
        self._num_samples = num_samples
        if self._interruption.requested:
            return True
        if self._interval is None:
            return False
        if self._interval.steps is not None:
            return self._step_of(num_samples) - self._saved >= self._interval.steps
        assert self._interval.seconds is not None
        return time.monotonic() - self._saved_s >= self._interval.seconds

    def use(self) -> None:
        """Write a checkpoint. Raises Interrupted if the run was asked to stop."""
        is_last, step = self._interruption.requested, self._step_of(self._num_samples)
        tensors, values = self._state()
        progress = {"run": run_of(self._settings), "strategy": PART, "chunk": None}
        parts = {PART: values, "progress": progress}
        self._writer.save(step, tensors, parts, wait=is_last)
        self._saved_s, self._saved = time.monotonic(), step
        if is_last:
            raise interrupted(self._interruption, step, self._session.folder)

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._writer.close()

    def _step_of(self, num_samples: int) -> int:
        return num_samples // self._settings.batch_size


def run_of(settings: TrainSettings) -> dict[str, Any]:
    """Return what a run must have in common with the one that it goes on from."""
    return {name: getattr(settings, name) for name in ("model", "batch_size", "seed")}


def resumed(state: State, settings: TrainSettings) -> Saved:
    """Return what was saved; InvalidInput if it was by another strategy, or of another run."""
    if PART not in state.parts:
        raise InvalidInput("resume", "the run had another strategy than hogbatch", hint="take that")
    check_same_run(state.parts["progress"]["run"], run_of(settings))
    return state.tensors, state.parts[PART]
