"""The settings of a profile: validated once, with errors that name the field."""

from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, model_validator

from paceline.core.units import Bytes
from paceline.settings import RunSettings, validated

SYNTHETIC = "synthetic"  # of the shape that the model takes
_LONGEST_S = 1e9


class ProfileSettings(RunSettings):
    """What `paceline profile` does: `steps` are measured as they are, and as many recorded.

    Without `data` they are synthetic, of the model's shape. With `largest_batch` the largest batch
    is looked for that a worker can train on within `memory` bytes, or within what is free; an
    attempt may take `attempt_s`.
    """

    data: str = SYNTHETIC
    workers: Annotated[int, Field(ge=1)] = 1
    steps: Annotated[int, Field(ge=4, le=100_000)] = 20
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    largest_batch: bool = False
    memory: Annotated[Bytes, Field(gt=0)] | None = None
    attempt_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 120.0

    @model_validator(mode="after")
    def _memory_bounds_the_search(self) -> Self:
        if self.memory is not None and not self.largest_batch:
            raise ValueError("memory: goes only with largest_batch, whose search it bounds")
        return self


def validated_profile(values: dict[str, Any]) -> ProfileSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: ProfileSettings = validated(TypeAdapter(ProfileSettings), values)
    settings.config()
    return settings
