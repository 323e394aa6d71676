"""The result of a run of strategy wheel, as result.json holds it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.core.errors import InvalidInput
from paceline.result import EpochRow
from paceline.settings import first_fault
from paceline.wheel_settings import WheelSettings


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Kind(BaseModel):
    """What tells such a result from others."""

    kind: str | None = None


class PurposeRow(_Record):
    """Bytes of one of the seven purposes: as they were counted, and by Table 1's formula.

    `travels` says whether they leave the hub.
    """

    purpose: str
    travels: bool
    nbytes: int
    formula_nbytes: int


class WheelResult(_Record):
    """What a run of strategy wheel did.

    `head` is the head's first layer. A step is one of every worker; the measured one is the mean
    over the run but its beginning, without the tests between epochs. `staleness` counts updates by
    how many others they missed. `wire_nbytes` are all that the hub sent and received, with headers.
    Bytes, samples/s and the measured step are those since the last restart, if there was one.
    `idle_shares` are those of the traced steps, in which each device computed nothing. `lost` are
    workers that ended before the run, `faults` where traced steps depart from the plan.
    """

    kind: Literal["wheel"] = "wheel"
    id: str
    settings: WheelSettings
    strategy: Literal["wheel"] = "wheel"
    machine: dict[str, Any]
    head: str
    epochs: tuple[EpochRow, ...]
    accuracy: float
    loss: float
    trained_s: float
    samples_per_s: float
    updates: int
    steps: tuple[int, ...]
    staleness: dict[int, int]
    mean_staleness: float
    purposes: tuple[PurposeRow, ...]
    wire_nbytes: tuple[int, int]
    predicted_step_s: float | None
    measured_step_s: float | None
    idle_shares: dict[str, float]
    predicted_idle_shares: dict[str, float]
    lost: tuple[str, ...]
    faults: tuple[str, ...]
    peak_memory_bytes: tuple[int, ...]

    @property
    def prediction_error(self) -> float | None:
        """How far the predicted step is from the measured one, as a share of the measured."""
        if self.predicted_step_s is None or not self.measured_step_s:
            return None
        return self.predicted_step_s / self.measured_step_s - 1


def read_wheel(folder: Path) -> WheelResult | None:
    """Return the result in a run's folder, or None if it is of another kind.

    InvalidInput names the file and what is wrong.
    """
    path = folder / "result.json"
    try:
        text = path.read_bytes()
        if _Kind.model_validate_json(text).kind != "wheel":
            return None
        return WheelResult.model_validate_json(text)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(f"{path}: {first_fault(error)}") from None
