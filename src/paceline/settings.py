"""The settings of a run: validated once, with errors that name the field."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from paceline.core.errors import InvalidInput
from paceline.core.strategy import Strategy
from paceline.strategies import find_exchange, find_in_step
from paceline.strategies.hogbatch.config import Hogbatch

AUTO = "auto"  # the strategy that is predicted to be the fastest
_OF_OTHERS = {"policy": "strategy hogbatch", "optimizer": "strategy hogbatch and wheel"}
_LARGEST_FLOAT32 = 3.4e38
_LONGEST_S = 1e9  # beyond it, clocks and timeouts overflow
_USUAL_RATE = 0.05
# From their initial weights these run away at the usual rate.
_RATE_OF = {"alexnet": 0.001}


class RunSettings(BaseModel):
    """What every run needs. `batch_size` is that of a step over all workers.

    `options` are fields of the strategy's configuration.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    strategy: str = "allreduce"
    options: dict[str, Any] = {}
    workers: Annotated[int, Field(ge=1)] = 2
    batch_size: Annotated[int, Field(ge=1)] = 64
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
        strategy = self._found()
        if "workers" in self.options:
            raise InvalidInput("options: workers is a setting of its own, not one of the strategy")
        values = self.options | {"workers": self.workers}
        return validated(TypeAdapter(strategy.config), values, f"strategy {self.strategy}")

    def _found(self) -> Strategy:
        return find_exchange(self.strategy)


class TrainSettings(RunSettings):
    """What `paceline train` does.

    With `balance` the workers' parts of a batch follow their speeds, and a worker that does not
    help is refused, unless `force` has it take part. A folder in `tensorboard` gets the run's
    scalars.
    """

    data: str = "digits"
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Annotated[float, Field(gt=0, le=_LARGEST_FLOAT32)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    profile_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 4.0
    balance: Literal["auto"] | None = None
    force: bool = False
    tensorboard: Path | None = None

    @model_validator(mode="after")
    def _only_who_balances_refuses(self) -> Self:
        if self.force and self.balance is None:
            raise ValueError("force: goes only with balance, which may refuse workers")
        return self

    def config(self) -> Any:
        """Return the strategy's configuration; None if the strategy is "auto", and to be chosen."""
        if self.strategy != AUTO:
            return super().config()
        if self.options:
            names = ", ".join(self.options)
            raise InvalidInput(f"options: with strategy auto nobody knows {names}; name a strategy")
        return None

    def _found(self) -> Strategy:
        if self.strategy == "subbatch" and self.balance is not None:
            raise InvalidInput("balance: goes not with strategy subbatch, whose parts are equal")
        return find_in_step(self.strategy)


def _each(stretch: Any) -> Any:
    """Return one number a worker of what stands for several: 4, or the text 1,4."""
    if isinstance(stretch, str):
        return tuple(stretch.split(","))
    return (stretch,) if isinstance(stretch, int | float) else stretch


Stretch = Annotated[
    tuple[Annotated[float, Field(ge=1, le=_LONGEST_S)], ...], BeforeValidator(_each)
]
Milliseconds = Annotated[float, Field(gt=0, le=1e3 * _LONGEST_S)] | None


class RehearseSettings(RunSettings):
    """What `paceline rehearse` does: `steps` are those that are measured.

    Layers take the time of `device`, a device of a machine file, where the totals of a step's
    phases may say more; or they take `stretch` times as long as here: all workers, or each one its
    own times. With `balance` the parts of a batch follow the workers' speeds. `chunk_search` looks
    for strategy host's chunk first.
    """

    device: str | None = None
    stretch: Stretch | None = None
    balance: Literal["auto"] | None = None
    forward_ms: Milliseconds = None
    backward_ms: Milliseconds = None
    update_ms: Milliseconds = None
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    steps: Annotated[int, Field(ge=3)] = 20
    chunk_search: Literal["runtime", "predicted"] | None = None
    search_step: Annotated[int, Field(ge=1)] | None = None
    search_range: Annotated[int, Field(ge=1)] | None = None
    interval: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_kind_of_device(self) -> Self:
        if (self.device is None) == (self.stretch is None):
            both = "both are given" if self.device is not None else "neither is given"
            raise ValueError(
                f"device, stretch: {both}; a rehearsal paces layers as a device, or stretches them"
            )
        if self.device is None:
            self._only_with("device", "forward_ms", "backward_ms", "update_ms")
        else:
            self._only_with("stretch", "balance")
        return self

    @model_validator(mode="after")
    def _one_stretch_a_worker(self) -> Self:
        if self.stretch is not None and len(self.stretch) not in (1, self.workers):
            raise ValueError(
                f"stretch: {len(self.stretch)} numbers for {self.workers} workers; give one for "
                "all, or one for each"
            )
        return self

    def _found(self) -> Strategy:
        if self.strategy == "subbatch" and self.stretch is not None:
            raise InvalidInput(
                "stretch: goes not with strategy subbatch, whose layers are paced; give a device"
            )
        return find_in_step(self.strategy)

    def stretch_of(self, rank: int) -> float:
        """Return how many times slower a worker is than this machine; 1 if it is paced."""
        if self.stretch is None:
            return 1.0
        return self.stretch[rank if len(self.stretch) > 1 else 0]

    @model_validator(mode="after")
    def _search_fits(self) -> Self:
        if self.chunk_search is None:
            self._only_with("chunk_search", "search_step", "search_range", "interval")
            return self
        if self.chunk_search == "predicted":
            self._only_with("chunk_search runtime", "search_step", "search_range")
        if self.strategy != "host":
            raise ValueError(f"chunk_search: strategy {self.strategy} has no chunks; host has")
        if self.workers == 1:
            raise ValueError("chunk_search: a single worker exchanges nothing")
        if "chunk" in self.options:
            raise ValueError("chunk_search: looks for the chunk that options already name")
        return self

    def _only_with(self, other: str, *fields: str) -> None:
        for field in fields:
            if getattr(self, field) is not None:
                raise ValueError(f"{field}: goes only with {other}")


class UnevenSettings(BaseModel):
    """What `paceline train --strategy hogbatch` does.

    `workers` is a number or a list such as cpu:1,cpu:1@slow=16,gpu:0. `batch_size` is the one that
    the learning rate was chosen for, `options` are fields of the strategy's configuration, and
    `optimizer` is one of torch's or "package.module:factory". A worker that does not help is
    refused, unless `force` has it take part.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    data: str = "digits"
    strategy: Literal["hogbatch"] = "hogbatch"
    options: dict[str, Any] = {}
    workers: str = "2"
    optimizer: str = "sgd"
    batch_size: Annotated[int, Field(ge=1)] = 64
    epochs: Annotated[int, Field(ge=1)] = 3
    learning_rate: Annotated[float, Field(gt=0, le=_LARGEST_FLOAT32)] = 0.05
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    profile_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 4.0
    force: bool = False
    deadline_s: Annotated[float, Field(gt=0, le=_LONGEST_S)] = 30.0
    output: Path = Path("runs")

    def config(self, num_workers: int) -> Hogbatch:
        """Return the strategy's configuration; InvalidInput names a field that is wrong."""
        for field, setting in (("workers", "workers"), ("threads", "workers, as in cpu:4")):
            if field in self.options:
                raise InvalidInput(f"options: {field} is said by {setting}")
        values = self.options | {"workers": num_workers}
        config: Hogbatch = validated(TypeAdapter(Hogbatch), values, f"strategy {self.strategy}")
        return config


def with_learning_rate(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values and, where they have none, the learning rate that suits their model."""
    if values.get("learning_rate") is not None:
        return values
    return values | {"learning_rate": _RATE_OF.get(str(values.get("model")), _USUAL_RATE)}


def validated_uneven(values: dict[str, Any]) -> UnevenSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: UnevenSettings = validated(TypeAdapter(UnevenSettings), with_learning_rate(values))
    settings.config(1)
    return settings


def validated_settings(values: dict[str, Any]) -> TrainSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    for name, strategy in _OF_OTHERS.items():
        if name in values:
            raise InvalidInput(f"{name}: goes only with {strategy}")
    settings: TrainSettings = validated(TypeAdapter(TrainSettings), with_learning_rate(values))
    settings.config()
    return settings


def validated_rehearsal(values: dict[str, Any]) -> RehearseSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings: RehearseSettings = validated(TypeAdapter(RehearseSettings), values)
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
