"""Checkpoints of a run: the group's state after an exchange, and what each worker has of its own.

    step-00000500/
        outer.safetensors        parameters and momentum by fragments, buffers
        worker-N.safetensors     optimizer, random numbers, error feedback, own parameters
        worker-N.json            its place in the round, schedule
        local.json               exchange, units, losses, epochs, for whom it fits

The hub asks for the workers' states with the reply to an exchange, and writes when all have come,
while training goes on.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load as tensors_of_bytes
from safetensors.torch import save as bytes_of_tensors
from torch import Tensor

from paceline.checkpoints import json_values
from paceline.checkpoints.folder import CheckpointFolder
from paceline.checkpoints.tensor_file import Tensors
from paceline.checkpoints.writer import BackgroundWriter
from paceline.core.errors import InvalidInput
from paceline.core.interval import Interval
from paceline.core.outcome import Epoch, Evaluation
from paceline.exchange.checkpoints import CHECKPOINTS, State, as_values, check_same_run
from paceline.strategies.local.config import Local
from paceline.strategies.local.log import RunLog
from paceline.strategies.local.outer import OuterModel
from paceline.strategies.local.protocol import Loss, OwnState, SavedHeader
from paceline.strategies.local.rounds import Rounds
from paceline.strategies.local.units import Units

logger = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A checkpoint whose workers' states are still to come."""

    exchange: int
    num_steps: int
    tensors: Tensors
    progress: dict[str, Any]
    log: RunLog
    expected: set[int]
    is_last: bool
    found: dict[int, OwnState] = field(default_factory=dict)


class Checkpoints:
    """Writes a run's checkpoints to its folder; without an interval, never.

    `run`: what a run must have in common with the one that it goes on from.
    """

    def __init__(
        self,
        folder: Path,
        interval: Interval | None,
        keep: int,
        outer: OuterModel,
        run: Mapping[str, Any],
        resumed: State | None,
    ) -> None:
        self._interval, self._outer, self._run = interval, outer, dict(run)
        self._writer = BackgroundWriter(CheckpointFolder(folder / CHECKPOINTS, keep))
        self._pending: _Pending | None = None
        self._saved_s = time.monotonic()
        self._saved_steps = 0
        self._resumed = resumed

    @property
    def is_pending(self) -> bool:
        """True while states of workers are still to come."""
        return self._pending is not None

    def is_due(self, num_steps: int) -> bool:
        """Return True if it is time for one, after so many steps of the run."""
        if self._interval is None or self._pending is not None:
            return False
        if self._interval.steps is not None:
            return num_steps // self._interval.steps > self._saved_steps // self._interval.steps
        assert self._interval.seconds is not None
        return time.monotonic() - self._saved_s >= self._interval.seconds

    def begin(
        self,
        exchange: int,
        rounds: Rounds[Any],
        log: RunLog,
        buffers: Sequence[Tensor],
        there: Sequence[int],
        *,
        is_last: bool,
    ) -> None:
        """Keep the group's state before an exchange, and wait for the states of the workers.

        The last one of a run that stops is written whatever is being written.
        """
        self._saved_s, self._saved_steps = time.monotonic(), log.num_steps
        tensors = {f"outer/{name}": one.clone() for name, one in self._outer.state().items()}
        tensors |= {f"outer/buffers/{i}": one.clone() for i, one in enumerate(buffers)}
        progress = {
            "run": self._run,
            "exchange": exchange,
            "num_steps": log.num_steps,
            "next_unit": rounds.units.next,
            "returned": list(rounds.units.returned),
            "dealt": {
                str(worker): {str(number): list(own) for number, own in one.units.items()}
                for worker, one in rounds.members.items()
            },
            "places": {str(number): list(place) for number, place in rounds.places.items()},
            "speeds": {str(worker): step_s for worker, step_s in rounds.speeds.items()},
        }
        own = exchange, log.num_steps, tensors, progress, log, set(there), is_last
        self._pending = _Pending(*own)
        self._write_if_complete()

    def add(self, worker: int, exchange: int, own: OwnState) -> None:
        """Take a worker's own state, and write if all have come."""
        pending = self._pending
        if pending is None or pending.exchange != exchange or worker not in pending.expected:
            return  # of a checkpoint that went on without it
        pending.expected.discard(worker)
        pending.found[worker] = own
        self._write_if_complete()

    def drop(self, worker: int) -> None:
        """Go on without a worker: it begins with a new optimizer."""
        if self._pending is not None:
            self._pending.expected.discard(worker)
            self._write_if_complete()

    def poll(self) -> None:
        """Look after what is being written."""
        self._writer.poll()

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.close()

    def _write_if_complete(self) -> None:
        pending = self._pending
        if pending is None or pending.expected:
            return
        self._pending = None
        # Now, for workers test before they save.
        log = pending.log
        progress = pending.progress | {
            "losses": [one.model_dump() for one in log.losses()],
            "epochs": as_values(log.epochs),
            "evaluations": as_values(log.evaluations),
        }
        tensors, parts = dict(pending.tensors), {"local": progress}
        for worker, own in pending.found.items():
            for name, one in tensors_of_bytes(own.tensors).items():
                tensors[f"worker-{worker}/{name}"] = one
            values = json_values.loads(own.values)
            parts[f"worker-{worker}"] = {**values, "place": [own.header.round, own.header.step]}
        self._writer.save(pending.num_steps, tensors, parts, wait=pending.is_last)

    def own_state(self, worker: int, exchange: int) -> OwnState | None:
        """Return what a worker had of its own, if the run goes on from that exchange."""
        if self._resumed is None or self._resumed.parts["local"]["exchange"] != exchange:
            return None
        values = dict(self._resumed.parts.get(f"worker-{worker}", {}))
        if not values:
            return None
        number, step = values.pop("place")
        tensors = bytes_of_tensors(self._resumed.file(f"worker-{worker}"))
        own = json_values.dumps("the state", values)
        return OwnState(SavedHeader(round=number, step=step), tensors, own)


def restored_rounds(
    state: State | None, num_units: int, config: Local, *, is_balanced: bool
) -> Rounds[Any]:
    """Return the rounds of a run from its beginning, or from where a state is.

    With another number of workers, units that were dealt go to whoever is there.
    """
    if state is None:
        return Rounds(Units(num_units), config, is_balanced=is_balanced)
    saved = state.parts["local"]
    units = Units(num_units, saved["next_unit"], saved["returned"])
    rounds: Rounds[Any] = Rounds(
        units,
        config,
        is_balanced=is_balanced,
        first_exchange=saved["exchange"],
        speeds={int(worker): step_s for worker, step_s in saved["speeds"].items()},
    )
    reserved = {
        int(worker): {int(number): own for number, own in dealt.items()}
        for worker, dealt in saved["dealt"].items()
    }
    places = {int(number): tuple(place) for number, place in saved["places"].items()}
    rounds.reserve(reserved, places)
    return rounds


def check_fits(state: State, run: Mapping[str, Any]) -> None:
    """Raise InvalidInput if a state is that of another strategy, or of another run."""
    if "local" not in state.parts:
        name = state.parts.get("progress", {}).get("strategy", "another")
        raise InvalidInput("resume", f"the run had strategy {name}", hint="take that")
    check_same_run(state.parts["local"]["run"], run)


def restored_log(state: State, log: RunLog) -> None:
    """Set the epochs and losses of a log as a state has them."""
    saved = state.parts["local"]
    log.epochs += [Epoch(**one) for one in saved["epochs"]]
    log.evaluations += [Evaluation(**one) for one in saved["evaluations"]]
    for one in saved["losses"]:
        log.add_loss(Loss(**one))
    log.num_steps = saved["num_steps"]


def restored_outer(state: State, outer: OuterModel, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Set the group's parameters and momentum as a state has them; return its buffers."""
    found = state.file("outer")
    try:
        outer.load(found)
    except InvalidInput as error:
        raise InvalidInput("resume", str(error)) from None
    return [found[f"buffers/{i}"] for i in range(len(buffers))]
