"""Write checkpoints in a background thread; training waits only for a copy in memory.

    save ─ copy tensors ─┐                               ┌─ next save: poll
    training ────────────┼───────────────────────────────┼────────────────────
    thread               └─ write, fsync, rename ────────┘

The background thread runs no torch operations, because torch's CPU threads are needed for training.
It releases the interpreter's lock while it computes checksums and writes.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import Future

import numpy as np
from torch import Event, Tensor

from paceline.checkpoints import json_values, tensor_file
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.tensor_file import Tensors, check_can_be_saved
from paceline.core.errors import CheckpointNotWritten
from paceline.links.call_thread import CallThread
from paceline.links.devices import device_of

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints to a folder in a background thread, one at a time.

    Host memory for one copy of the tensors remains allocated; for GPU tensors it is pinned.
    `deadline_s`: longest time to wait for a checkpoint that is being written.
    """

    def __init__(self, folder: CheckpointFolder, deadline_s: float = 600.0) -> None:
        self._folder, self._deadline_s = folder, deadline_s
        self._copies: Tensors = {}
        self._thread = CallThread("paceline checkpoints", goes_on=True)
        self._writing: Future[object] | None = None
        # `_step`: step of the last checkpoint begun. `_has_warned`: whether a later checkpoint was
        # skipped with a warning.
        self._step, self._has_warned = 0, False

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        json_parts: Mapping[str, Json],
        *,
        wait: bool = False,
    ) -> None:
        """Copy the state after a step, and begin to write its checkpoint.

        Tensor `FILE/NAME` is stored as NAME in FILE.safetensors; JSON part NAME is stored in
        NAME.json. If an earlier checkpoint is still being written, the new one is skipped with a
        warning. But if `wait` is true, `save` returns only after both are written. If writing
        fails, for example on a full disk, a warning is logged, and training continues. Raises
        InvalidInput for an unsupported value.
        """
        self.poll()
        if self.is_writing and not wait:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    f"no checkpoint of step {step}: step {self._step} is still being written"
                )
            return
        if not self._wait():
            return
        parts = {name: json_values.copied(name, part) for name, part in json_parts.items()}
        for name, tensor in tensors.items():
            check_can_be_saved(name, tensor)
        arrivals, copies = self._copy(tensors), self._copies

        def write() -> None:
            for event in arrivals:
                event.synchronize()
            self._folder.write(step, copies, parts)

        self._step, self._has_warned = step, False
        self._writing = self._thread.submit(write)
        if wait:
            self._wait()

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def poll(self) -> None:
        """Check without waiting whether the last checkpoint is written; warn if writing failed."""
        if self._writing is None or self.is_writing:
            return
        error, self._writing = self._writing.exception(), None
        if isinstance(error, CheckpointNotWritten):
            logger.warning("%s; the run continues", error)
        elif error is not None:
            raise error

    def close(self) -> None:
        """Wait up to the deadline for the last checkpoint, and free the copies."""
        try:
            self._wait()
        finally:
            self._thread.close(0 if self.is_writing else None)
            self._copies = {}

    def _wait(self) -> bool:
        """Wait for the current checkpoint; warn and return False if the deadline passes."""
        if self._writing is not None:
            try:
                self._writing.exception(self._deadline_s)
            except TimeoutError:
                logger.warning(
                    f"{self._folder.path}: the checkpoint of step {self._step} is not written "
                    f"after {self._deadline_s:g} s; the run does not wait for it"
                )
                return False
        self.poll()
        return True

    def _copy(self, tensors: Mapping[str, Tensor]) -> list[Event]:
        """Copy the tensors to host memory; return an event for each GPU, recorded after its copies.

        The copies run on the compute stream, so they end before later work changes the tensors.
        """
        before, self._copies = self._copies, {}
        devices = {}
        for name, tensor in tensors.items():
            source, kept = tensor.detach(), before.get(name)
            device = devices[tensor.device] = device_of(tensor.device)
            if kept is None or (kept.shape, kept.dtype) != (source.shape, source.dtype):
                kept = device.pinned_like(source.contiguous())
            if device.is_asynchronous:
                # Make `source` contiguous: a copy between memory layouts would block the host.
                kept.copy_(source.contiguous(), non_blocking=True)
            elif source.is_contiguous():
                # numpy copies in this thread only, but torch would use all of its threads. When
                # other ranks kept the cores busy, a copy of 360 MB took 1 to 8 s with torch's
                # threads, and 0.14 s with one thread.
                np.copyto(tensor_file.bytes_of(kept), tensor_file.bytes_of(source))
            else:
                kept.copy_(source)
            self._copies[name] = kept
        return [one.record() for one in devices.values() if one.is_asynchronous]
