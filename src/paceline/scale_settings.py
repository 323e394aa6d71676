"""The settings of a scaling study, and the cells that they ask for."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from paceline.core.timeline import Origin
from paceline.settings import validated
from paceline.strategies import EXCHANGES

Scaling = Literal["strong", "weak"]
_LONGEST_S = 1e9
_Count = Annotated[int, Field(ge=1, le=2**31)]
_Counts = Annotated[tuple[_Count, ...], Field(min_length=1)]


class Point(NamedTuple):
    """What a cell is about: a method on so many workers.

    With strong scaling `batch` is shared by the workers and an epoch keeps its samples; with weak
    scaling each worker has a batch of its own, and the samples grow with the workers.
    """

    method: str
    workers: int
    batch: int
    scaling: Scaling

    @property
    def batch_size(self) -> int:
        """Samples of a step over all workers."""
        return self.batch if self.scaling == "strong" else self.batch * self.workers

    def steps_of(self, samples: int) -> int:
        """Return the steps of an epoch; `samples` are those of one worker's epoch."""
        total = samples if self.scaling == "strong" else samples * self.workers
        return -(-total // self.batch_size)


class ScaleSettings(BaseModel):
    """What `paceline scale` does.

    Cells are measured unless `device` or `predict` asks for others; `measure` adds them to those.
    `device` paces rehearsals, `machine` is the file that predictions are for; without one they are
    those which runs make from their profile. A run takes `steps` steps, of which the epochs of
    `samples` follow, and is given up after `deadline_s`. `classes` are those of the synthetic
    samples of `input_shape`; built-in models know their shape.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    workers: _Counts = (1, 2)
    batch: _Counts = (16, 32, 64)
    exchange: Annotated[tuple[str, ...], Field(min_length=1)] = ("allreduce", "tree", "host")
    scaling: Annotated[tuple[Scaling, ...], Field(min_length=1)] = ("strong",)
    measure: bool = False
    device: str | None = None
    predict: bool = False
    machine: str | None = None
    repeats: Annotated[int, Field(ge=1, le=1000)] = 3
    steps: Annotated[int, Field(ge=5)] = 20
    samples: Annotated[int, Field(ge=1, le=2**53)] = 262_144
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    classes: Annotated[int, Field(ge=2)] = 10
    profile_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 1.0
    deadline_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 600.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @field_validator("exchange")
    @classmethod
    def _methods_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in EXCHANGES:
                raise ValueError(f"{name!r} is not known; choose from {', '.join(EXCHANGES)}")
        return names

    @field_validator("workers", "batch", "exchange", "scaling")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands there twice")
        return values

    @model_validator(mode="after")
    def _machine_is_predicted(self) -> Self:
        if self.machine is not None and not self.predict:
            raise ValueError("machine: goes only with predict")
        return self

    @property
    def kinds(self) -> tuple[Origin, ...]:
        """What the cells are: measured, rehearsed, predicted."""
        asked = {"rehearsed": self.device is not None, "predicted": self.predict}
        measured = self.measure or not any(asked.values())
        kinds: tuple[Origin, ...] = ("measured", "rehearsed", "predicted")
        return tuple(kind for kind in kinds if asked.get(kind, measured))

    @property
    def trains(self) -> bool:
        """Whether models are trained: to be measured, or for what a run predicts before."""
        return "measured" in self.kinds or (self.machine is None and self.device is None)

    @property
    def points(self) -> Iterator[Point]:
        """What the cells are about."""
        for batch in self.batch:
            for workers in self.workers:
                for scaling in self.scaling:
                    for method in self.exchange:
                        yield Point(method, workers, batch, scaling)


def validated_scale(values: dict[str, Any]) -> ScaleSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: ScaleSettings = validated(TypeAdapter(ScaleSettings), values)
    return settings
