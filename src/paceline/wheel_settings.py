"""The settings of a run or a rehearsal of strategy wheel, and of a worker that joins one."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from paceline.core.errors import InvalidInput
from paceline.settings import Milliseconds, validated, with_learning_rate
from paceline.strategies.wheel.config import Wheel
from paceline.strategies.wheel.split import Purpose

_LARGEST_FLOAT32 = 3.4e38
_LONGEST_S = 1e9
_FIELDS = {
    Purpose.ACTIVATIONS: "activations",
    Purpose.RESIDUALS: "residuals",
    Purpose.BODY_PARAMETERS: "parameters",
    Purpose.BODY_GRADIENTS: "gradients",
}
_Seconds = Annotated[float, Field(gt=0, le=_LONGEST_S)]


class _HubSettings(BaseModel):
    """What a hub needs to know, whether workers train or rehearse.

    `batch_size` are the samples of a step over all workers, `options` fields of the strategy's
    configuration. With `bind` the hub listens there for workers of other machines, and needs
    `keys`, unless only this machine reaches it; without it starts its workers. `run` is a name that
    hub and workers have in common. A hub without workers gives up after `wait_s`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    strategy: Literal["wheel"] = "wheel"
    options: dict[str, Any] = {}
    workers: Annotated[int, Field(ge=1, le=4096)] = 2
    batch_size: Annotated[int, Field(ge=1)] = 64
    profile_s: Annotated[float, Field(ge=0, le=_LONGEST_S)] = 1.0
    deadline_s: _Seconds = 30.0
    wait_s: _Seconds = 600.0
    output: Path = Path("runs")
    bind: str | None = None
    keys: Path | None = None
    run: str = "wheel"

    @model_validator(mode="after")
    def _shared_and_reached(self) -> Self:
        if self.keys is not None and self.bind is None:
            raise ValueError("keys: are for workers of other machines; name the address by bind")
        if self.batch_size < self.workers:
            raise ValueError(
                f"batch_size: {self.batch_size} samples cannot be shared by {self.workers} workers"
            )
        return self

    def config(self) -> Wheel:
        """Return the strategy's configuration; InvalidInput names a field that is wrong."""
        return config_of(self.options, self.workers)


class WheelSettings(_HubSettings):
    """What `paceline train --strategy wheel` and `paceline hub` do.

    Snapshots are written to `snapshots` every `snapshot_s`, and `resume` goes on from the last one.
    """

    data: str = "digits"
    optimizer: str = "sgd"
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Annotated[float, Field(gt=0, le=_LARGEST_FLOAT32)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    snapshots: Path | None = None
    snapshot_s: Annotated[float, Field(ge=0, le=_LONGEST_S)] = 60.0
    resume: bool = False

    @model_validator(mode="after")
    def _goes_on_from_somewhere(self) -> Self:
        if self.resume and self.snapshots is None:
            raise ValueError("resume: goes only with snapshots, the folder to go on from")
        return self


class WheelRehearseSettings(_HubSettings):
    """What `paceline rehearse --strategy wheel` does: `steps` of every worker are rehearsed.

    Layers and updates take the time of `device`, a device of a machine file, where the totals of a
    whole model's phases may say more. Workers learn from the hub that the run is a rehearsal.
    """

    device: str
    forward_ms: Milliseconds = None
    backward_ms: Milliseconds = None
    update_ms: Milliseconds = None
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    steps: Annotated[int, Field(ge=3)] = 20


def config_of(options: dict[str, Any], workers: int) -> Wheel:
    """Return the strategy's configuration; InvalidInput names a field that is wrong."""
    for field, why in (
        ("workers", "is a setting of its own, not one of the strategy"),
        ("hub", "names a host of a machine file; a run's hub is where it is started"),
    ):
        if field in options:
            raise InvalidInput(f"options: {field} {why}")
    values = options | {"workers": workers}
    config: Wheel = validated(TypeAdapter(Wheel), values, "strategy wheel")
    return config


def validated_wheel(values: dict[str, Any]) -> WheelSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: WheelSettings = validated(TypeAdapter(WheelSettings), with_learning_rate(values))
    settings.config()
    return settings


def validated_wheel_rehearsal(values: dict[str, Any]) -> WheelRehearseSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: WheelRehearseSettings = validated(TypeAdapter(WheelRehearseSettings), values)
    settings.config()
    return settings


def codec_options(text: str | None) -> dict[str, str]:
    """Return the options that a text such as body-gradients=dynamic8,activations=half stands for.

    InvalidInput for what does not travel, or is named twice.
    """
    options: dict[str, str] = {}
    for part in text.split(",") if text else ():
        purpose, equals, codec = (word.strip() for word in part.partition("="))
        if not equals or not codec:
            raise InvalidInput(f"codec: {part!r} is not of the form body-gradients=dynamic8")
        if purpose not in _FIELDS:
            raise InvalidInput(
                f"codec: {purpose!r} travels by none; choose from {', '.join(_FIELDS)}"
            )
        field = _FIELDS[Purpose(purpose)]
        if field in options:
            raise InvalidInput(f"codec: {purpose} is named twice")
        options[field] = codec
    return options


def numbers(text: str) -> tuple[int, ...]:
    """Return the workers' numbers in a text such as 2,3; InvalidInput if they are none."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise InvalidInput(f"workers: {text!r} are no numbers of workers, such as 0,1")
    return found
