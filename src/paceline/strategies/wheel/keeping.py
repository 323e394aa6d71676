"""When a hub takes snapshots, and how it goes on from one."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import InvalidInput
from paceline.strategies.wheel import snapshot
from paceline.strategies.wheel.manifest import NAME
from paceline.strategies.wheel.server import ParameterServer
from paceline.strategies.wheel.tally import Tally
from paceline.training.loop import Epoch

_EPOCHS = "epochs.json"
_READ = TypeAdapter(list[Epoch])


class Keeper:
    """Keeps the latest snapshot of a server in a folder; without one it keeps nothing."""

    def __init__(
        self,
        folder: Path | None,
        every_s: float,
        server: ParameterServer,
        run_id: str,
        layout: str,
    ) -> None:
        self._folder, self._every_s = folder, every_s
        self._server, self._run_id, self._layout = server, run_id, layout
        self._kept_s = time.monotonic()
        self._version = server.version

    def look(self, tally: Tally) -> None:
        """Keep a snapshot if it is time."""
        if time.monotonic() - self._kept_s >= self._every_s:
            self.keep(tally)

    def keep(self, tally: Tally) -> None:
        """Keep a snapshot, if anything was learnt since the last one."""
        if self._folder is None or self._server.version == self._version:
            return
        snapshot.save(self._folder, self._server, run_id=self._run_id, layout=self._layout)
        _write(self._folder / _EPOCHS, [asdict(epoch) for epoch in tally.epochs])
        self._kept_s, self._version = time.monotonic(), self._server.version

    def resume(self, tally: Tally, steps_per_epoch: int) -> str:
        """Have the server go on from the snapshot, and return what a log should say of that.

        InvalidInput if there is none, or it is of another run.
        """
        if self._folder is None:
            raise InvalidInput("resume: name the folder of the snapshots, too")
        found = snapshot.load(self._folder, self._server, layout=self._layout)
        self._version = self._server.version
        steps = [worker.next_step for worker in found.workers]
        tally.epochs += _read(self._folder / _EPOCHS)[: min(steps) // steps_per_epoch]
        written_s = (self._folder / NAME).stat().st_mtime
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
        return (
            f"resumed from {self._folder}, written at {at} after {found.version} updates (workers "
            f"at steps {steps}); updates made after that are lost, at most those of "
            f"{self._every_s:g} s, and are made again"
        )


def _write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.replace(path)


def _read(path: Path) -> list[Epoch]:
    try:
        return _READ.validate_json(path.read_bytes())
    except FileNotFoundError:  # killed between the snapshot and this file
        return []
    except (OSError, ValidationError) as error:
        raise InvalidInput(f"{path}: cannot be read: {error}") from None
