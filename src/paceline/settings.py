"""The settings of a run: validated once, with errors that name the field."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from paceline.core.errors import InvalidInput
from paceline.strategies import find_strategy

_LARGEST_FLOAT32 = 3.4e38
_LONGEST_S = 1e9  # beyond it, clocks and timeouts overflow


class TrainSettings(BaseModel):
    """What `paceline train` does. `batch_size` is that of a step over all workers.

    `options` are fields of the strategy's configuration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    data: str = "digits"
    strategy: str = "allreduce"
    options: dict[str, Any] = {}
    workers: Annotated[int, Field(ge=1)] = 2
    epochs: Annotated[int, Field(ge=1)] = 3
    batch_size: Annotated[int, Field(ge=1)] = 64
    learning_rate: Annotated[float, Field(gt=0, le=_LARGEST_FLOAT32)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    profile_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 4.0
    deadline_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 30.0
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    output: Path = Path("runs")

    @model_validator(mode="after")
    def _batch_fits_workers(self) -> Self:
        if self.batch_size < self.workers:
            raise ValueError(
                f"batch_size: {self.batch_size} samples cannot be shared by {self.workers} workers"
            )
        return self

    def config(self) -> Any:
        """Return the strategy's configuration; InvalidInput names a field that is wrong."""
        strategy = find_strategy(self.strategy)
        if "workers" in self.options:
            raise InvalidInput("options: workers is a setting of its own, not one of the strategy")
        values = self.options | {"workers": self.workers}
        return validated(TypeAdapter(strategy.config), values, f"strategy {self.strategy}")


def validated_settings(values: dict[str, Any]) -> TrainSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: TrainSettings = validated(TypeAdapter(TrainSettings), values)
    settings.config()
    return settings


def validated(adapter: TypeAdapter[Any], values: Any, source: str = "") -> Any:
    """Return the validated values, or raise InvalidInput with the first field that is wrong."""
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        raise InvalidInput(": ".join(filter(None, (source, first_fault(error))))) from None


def first_fault(error: ValidationError) -> str:
    """Return which field is wrong, what it was, and what would be right."""
    fault = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    given = "" if fault["type"] in ("missing", "value_error") else f", not {fault['input']!r}"
    return f"{field}: {message}{given}" if field else message
