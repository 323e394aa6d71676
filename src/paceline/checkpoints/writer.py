"""Writes checkpoints beside training, which only waits for a copy in memory.

    save ─ copy tensors ─┐                          ┌─ next save: poll
    training ────────────┼──────────────────────────┼────────────────────
    thread               └─ write, sum, sync, rename ┘

The thread computes nothing with torch, whose threads are training's: it waits for copies from a
GPU, sums and writes. While a piece is summed or written, it does not hold the interpreter's lock.
"""

import logging
import threading
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from paceline.checkpoints import json_values, tensor_file
from paceline.checkpoints.folder import CheckpointFolder, Contents
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved
from paceline.core.errors import CheckpointNotWritten, InvalidInput
from paceline.links.devices import Event, device_of

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints to a folder in a thread of its own, one at a time.

    The copies lie in host memory that is kept for them, as much as the tensors have, pinned where
    they come from a GPU. `deadline_s` bounds all waiting for the disk. `written_step` is the step
    of the last checkpoint that was written.
    """

    def __init__(self, folder: CheckpointFolder, deadline_s: float = 600.0) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._copies: Tensors = {}
        self._writing: _Writing | None = None
        self.written_step: int | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        json_parts: Mapping[str, Json],
        *,
        wait: bool = False,
    ) -> bool:
        """Copy the state after a step and begin to write it; return False if it was skipped.

        A tensor `FILE/NAME` becomes NAME in FILE.safetensors, a part NAME.json. While the one
        before is still being written, this one is skipped, and a warning says so; with `wait` it
        waits for the one before, and for its own. What cannot be written is one warning, and no
        error: training goes on. Raises InvalidInput for what a checkpoint cannot hold.
        """
        self.poll()
        if self._writing is not None and not wait:
            if not self._writing.has_delayed:  # a line for each of many steps says no more
                self._writing.has_delayed = True
                logger.warning(
                    "no checkpoint of step %d: that of step %d is still being written",
                    *(step, self._writing.step),
                )
            return False
        if not self._wait(self._deadline_s):
            return False
        parts = {
            f"{name}.json": json_values.copied(name, part) for name, part in json_parts.items()
        }
        _check_names(tensors)
        arrivals = self._copy(tensors)
        self._writing = _Writing(self._folder, step, {**_by_file(self._copies), **parts}, arrivals)
        return self._wait(self._deadline_s) if wait else True

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written: `save` would skip one, or wait."""
        return self._writing is not None and self._writing.thread.is_alive()

    def poll(self) -> None:
        """Look after the thread without waiting: a checkpoint that failed is one warning."""
        writing = self._writing
        if writing is None or self.is_writing:
            return
        self._writing = None
        if writing.error is None:
            self.written_step = writing.step
        elif isinstance(writing.error, CheckpointNotWritten):
            logger.warning("%s; the run goes on", writing.error)
        else:
            raise writing.error

    def close(self, deadline_s: float | None = None) -> None:
        """Wait for what is being written, until the deadline, and free the memory of the copies."""
        self._wait(self._deadline_s if deadline_s is None else deadline_s)
        self._copies = {}

    def _wait(self, deadline_s: float) -> bool:
        """Wait for the thread; return False, with a warning, if it is not done in time."""
        if self._writing is not None:
            self._writing.thread.join(deadline_s)
            if self._writing.thread.is_alive():
                logger.warning(
                    "%s: the checkpoint of step %d is not written after %g s; the run does not "
                    "wait for it",
                    *(self._folder.path, self._writing.step, deadline_s),
                )
                return False
        self.poll()
        return True

    def _copy(self, tensors: Mapping[str, Tensor]) -> list[Event]:
        """Copy the tensors; return the events at which those of GPUs have arrived.

        They are copied in the stream that computes, so that what comes later in it may change them.
        """
        before, self._copies = self._copies, {}
        devices = {}
        for name, tensor in tensors.items():
            source, kept = tensor.detach(), before.get(name)
            device = devices[tensor.device] = device_of(tensor.device)
            if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
                kept = device.pinned_like(source.contiguous())
            if device.is_asynchronous:  # the host waits for a copy between two layouts
                kept.copy_(source.contiguous(), non_blocking=True)
            else:
                _copy_on_host(kept, source)
            self._copies[name] = kept
        return [one.current_stream().record() for one in devices.values() if one.is_asynchronous]


class _Writing:
    """One checkpoint that is being written by a thread; `error` is what it ended with.

    `has_delayed`: another one was skipped meanwhile.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        files: Mapping[str, Contents],
        arrivals: list[Event],
    ) -> None:
        self.step, self.has_delayed = step, False
        self.error: Exception | None = None
        self._folder, self._files, self._arrivals = folder, files, arrivals
        # A daemon: a disk that hangs does not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=f"checkpoint {step}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for event in self._arrivals:
                event.synchronize()
            self._folder.write(self.step, self._files)
        except Exception as error:
            self.error = error


def _copy_on_host(target: Tensor, source: Tensor) -> None:
    """Copy a tensor in this thread alone.

    torch has all its threads copy a part, and wait for each other: on cores that other ranks use,
    360 MB took 1 to 8 s so, and 0.14 s by one thread, which is as fast as memory is for one core.
    """
    if source.is_contiguous():
        np.copyto(tensor_file.bytes_of(target), tensor_file.bytes_of(source))
    else:
        target.copy_(source)


def _check_names(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        file, _, rest = name.partition("/")
        if not (file and rest):
            raise InvalidInput(f"{name!r}", "a tensor of a checkpoint is named FILE/NAME")
        check_can_be_saved(name, tensor)


def _by_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Return the tensors by the names of their files."""
    files: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        file, _, rest = name.partition("/")
        files.setdefault(f"{file}.safetensors", {})[rest] = tensor
    return files
