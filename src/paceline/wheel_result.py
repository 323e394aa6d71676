"""The result of a run or a rehearsal of strategy wheel, as result.json holds it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.result import EpochRow
from paceline.result_file import read_kind
from paceline.wheel_settings import WheelRehearseSettings, WheelSettings


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PurposeRow(_Record):
    """Bytes of one of the seven purposes: as they were counted, and by Table 1's formula.

    `travels` says whether they leave the hub.
    """

    purpose: str
    travels: bool
    nbytes: int
    formula_nbytes: int


class _Served(_Record):
    """What a hub found, in a run or in a rehearsal.

    `head` is the head's first layer. A step is one of every worker. `staleness` counts updates by
    how many others they missed. `wire_nbytes` are all that the hub sent and received, with headers.
    `idle_shares` are those of the traced steps, in which each device computed nothing. `lost` are
    workers that ended before the run, `faults` where traced steps depart from the plan.
    """

    id: str
    strategy: Literal["wheel"] = "wheel"
    machine: dict[str, Any]
    head: str
    samples_per_s: float
    updates: int
    steps: tuple[int, ...]
    staleness: dict[int, int]
    mean_staleness: float
    purposes: tuple[PurposeRow, ...]
    wire_nbytes: tuple[int, int]
    predicted_step_s: float | None
    idle_shares: dict[str, float]
    predicted_idle_shares: dict[str, float]
    lost: tuple[str, ...]
    faults: tuple[str, ...]
    peak_memory_bytes: tuple[int, ...]


class WheelResult(_Served):
    """What a run of strategy wheel did.

    The measured step is the mean over the run but its beginning, without the tests between epochs.
    Bytes, samples/s and the measured step are those since the last restart, if there was one.
    """

    kind: Literal["wheel"] = "wheel"
    settings: WheelSettings
    epochs: tuple[EpochRow, ...]
    accuracy: float
    loss: float
    trained_s: float
    measured_step_s: float | None

    @property
    def prediction_error(self) -> float | None:
        """How far the predicted step is from the measured one, as a share of the measured."""
        return _error(self.predicted_step_s, self.measured_step_s)


class WheelRehearsal(_Served):
    """What a rehearsal of strategy wheel did; `devices` says what the devices stood for.

    The rehearsed step is the mean over all but the first ones and the last; between the quartiles
    are half of them.
    """

    kind: Literal["wheel"] = "wheel"
    origin: Literal["rehearsed"] = "rehearsed"
    settings: WheelRehearseSettings
    devices: str
    rehearsed_step_s: float
    lower_quartile_s: float
    upper_quartile_s: float

    @property
    def prediction_error(self) -> float | None:
        """How far the predicted step is from the rehearsed one, as a share of the rehearsed."""
        return _error(self.predicted_step_s, self.rehearsed_step_s)


def _error(predicted_s: float | None, happened_s: float | None) -> float | None:
    return predicted_s / happened_s - 1 if predicted_s is not None and happened_s else None


def read_wheel(folder: Path) -> WheelResult | WheelRehearsal | None:
    """Return the result in a run's folder, or None if it is of another kind.

    InvalidInput names the file and what is wrong.
    """
    return read_kind(folder, "wheel", WheelResult, WheelRehearsal)
