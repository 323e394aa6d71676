"""Checkpoints of a parameter server: a hub that was killed goes on from the last one.

    model.safetensors       parameters and buffers
    optimizer.safetensors   the optimizer's tensors; optimizer.json has its numbers
    random.safetensors      the states of random numbers; with random.json
    server.json             the updates, the steps of each worker, the epochs that are over

Half-done steps are not in it: their workers begin them again.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline.checkpoints.folder import CheckpointFolder, Loaded
from paceline.checkpoints.json_values import Json
from paceline.checkpoints.state import (
    check_fits,
    load_module_state,
    load_optimizer_state,
    load_schedule_state,
    module_state,
    optimizer_state,
    random_state,
    restore_random_state,
    schedule_state,
)
from paceline.checkpoints.tensor_file import Tensors
from paceline.checkpoints.writer import BackgroundWriter
from paceline.core.errors import InvalidInput
from paceline.core.outcome import Epoch
from paceline.rpc.workers import difference
from paceline.strategies.wheel.config import first_fault
from paceline.strategies.wheel.server import ALL_WORKERS, ParameterServer
from paceline.strategies.wheel.staleness import WorkerProgress

logger = logging.getLogger(__name__)
_SERVER = "server"  # the JSON that only checkpoints of this strategy have


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerProgress:
    """How far a server is, after `version` updates; `staleness` counts those of all workers."""

    run_id: str
    layout: str
    version: int
    workers: list[WorkerProgress]
    staleness: dict[int, int]
    epochs: list[Epoch]


class Checkpoints:
    """Saves a server to a folder every `every_s` seconds; without a folder, never."""

    def __init__(
        self,
        folder: Path | None,
        every_s: float,
        server: ParameterServer,
        run_id: str,
        layout: str,
        keep: int = 2,
    ) -> None:
        self._folder = None if folder is None else CheckpointFolder(folder, keep)
        self._writer = None if self._folder is None else BackgroundWriter(self._folder)
        self._server, self._run_id, self._layout = server, run_id, layout
        self._every_s, self._saved_s = every_s, time.monotonic()
        self._first_version = self._version = server.version

    def save_if_due(self, epochs: Sequence[Epoch]) -> None:
        """Begin to write a checkpoint if it is time, and there was an update since the last one."""
        if self._writer is None:
            return
        self._writer.poll()
        is_early = time.monotonic() - self._saved_s < self._every_s
        if not (is_early or self._writer.is_writing or self._server.version == self._version):
            self._save(self._writer, epochs)

    def close(self, epochs: Sequence[Epoch] | None = None) -> None:
        """End what is being written; with the epochs, write the last checkpoint, if any is due."""
        if self._writer is not None:
            if epochs is not None and self._server.version != self._first_version:
                self._save(self._writer, epochs, wait=True)
            self._writer.close()

    def _save(self, writer: BackgroundWriter, epochs: Sequence[Epoch], wait: bool = False) -> None:
        self._saved_s, self._version = time.monotonic(), self._server.version
        state = state_of(self._server, self._run_id, self._layout, epochs)
        writer.save(self._version, *state, wait=wait)

    def resume(self, epochs: list[Epoch], steps_per_epoch: int) -> str:
        """Load the newest checkpoint into the server and `epochs`; return a line about it.

        Raises InvalidInput if there is none, or it is of another run.
        """
        if self._folder is None:
            raise InvalidInput("resume", "name the folder of the snapshots, too")
        loaded, progress = load(self._folder, self._server, layout=self._layout)
        for line in loaded.skipped:
            logger.warning("%s: the checkpoint before it is used", line)
        self._first_version = self._version = self._server.version
        steps = [worker.next_step for worker in progress.workers]
        # A slower worker may go on in an epoch that the others have completed: it is tested again.
        epochs += progress.epochs[: min(steps) // steps_per_epoch]
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(loaded.written_s))
        return (
            f"resumed from {self._folder.path}, written at {at} after {progress.version} updates "
            f"(workers at steps {steps}); updates made after that are lost, at most those of "
            f"{self._every_s:g} s, and are made again"
        )


def state_of(
    server: ParameterServer, run_id: str, layout: str, epochs: Sequence[Epoch] = ()
) -> tuple[Tensors, dict[str, Json]]:
    """Return the tensors and the JSON parts of a checkpoint of the server and of this process."""
    of_optimizer, optimizer = optimizer_state(server.optimizer, server.model.named_parameters())
    of_random, random = random_state(server.device)
    tensors = {
        f"{file}/{name}": tensor
        for file, found in (
            ("model", module_state(server.model)),
            ("optimizer", of_optimizer),
            ("random", of_random),
        )
        for name, tensor in found.items()
    }
    progress = ServerProgress(
        run_id,
        layout,
        server.version,
        server.workers.progress(),
        dict(server.updates.staleness[ALL_WORKERS]),
        list(epochs),
    )
    parts = {_SERVER: asdict(progress), "optimizer": optimizer, "random": random}
    if server.schedule is not None:
        parts["schedule"] = schedule_state(server.schedule)
    return tensors, parts


def load(
    folder: CheckpointFolder, server: ParameterServer, *, layout: str, run_id: str | None = None
) -> tuple[Loaded, ServerProgress]:
    """Load the newest checkpoint into a new server; return it and its progress.

    The values of the checkpoint replace the server's, learning rates among them. Raises
    InvalidInput if there is none, or it is one of another run, layout, model, optimizer or number
    of workers, and names the difference; nothing of the server is changed then.
    """
    loaded = folder.latest()
    if loaded is None:
        raise InvalidInput(str(folder.path), "there is no snapshot")
    if f"{_SERVER}.json" not in loaded.names:
        raise InvalidInput("resume", "the run had another strategy than wheel", hint="take that")
    try:
        progress = TypeAdapter(ServerProgress).validate_python(loaded.json(_SERVER))
    except ValidationError as error:
        raise InvalidInput(str(loaded.path), f"server.json: {first_fault(error)}") from None
    for what, wanted, found in (
        ("run", run_id, progress.run_id),
        ("number of workers", len(server.workers.all), len(progress.workers)),
    ):
        if wanted not in (None, found):
            raise InvalidInput(str(loaded.path), f"the snapshot's {what} is {found}, not {wanted}")
    if (other := difference(layout, progress.layout)) is not None:
        raise InvalidInput(
            "resume",
            f"{loaded.path} is of another run, with {other}",
            hint="another run begins anew, without resume",
        )
    try:
        _load_state(server, loaded)
    except InvalidInput as error:
        raise InvalidInput(str(loaded.path), f"the snapshot does not fit: {error}") from None
    server.restore(progress.version, progress.workers, progress.staleness)
    return loaded, progress


def _load_state(server: ParameterServer, loaded: Loaded) -> None:
    """Load tensors, the model's last: they are checked before, so that all fits or nothing is."""
    tensors, names = loaded.tensors("model"), server.model.named_parameters()
    check_fits(module_state(server.model), tensors)
    of_random, of_optimizer = loaded.tensors("random"), loaded.tensors("optimizer")
    restore_random_state(server.device, of_random, loaded.json("random"))
    load_optimizer_state(server.optimizer, names, of_optimizer, loaded.json("optimizer"))
    if server.schedule is not None:
        load_schedule_state(server.schedule, loaded.json("schedule"))
    load_module_state(server.model, tensors)
