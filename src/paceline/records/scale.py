"""Settings and result of `paceline scale`; a cell is an epoch of one configuration."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from paceline.core.losses import unrest_between
from paceline.core.outcome import Finding
from paceline.core.settings import InputShape, Model, Record, Seconds, read_list
from paceline.core.timeline import Origin
from paceline.strategies import EXCHANGES, find_exchange

Scaling = Literal["strong", "strong-per-worker", "weak"]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Kind = Literal[Origin.MEASURED, Origin.REHEARSED, Origin.PREDICTED]
_Count = Annotated[int, Field(ge=1, le=2**31)]
_MOST = 64  # maximum number of values in a list, such as --workers


class Point(NamedTuple):
    """A strategy (`method`) with a number of workers and a batch size.

    Scaling "strong": `batch` is the batch size of all workers together. "strong-per-worker":
    `batch` is the batch size of each worker (figure 3 of Mojumder et al. 2018). "weak": as
    "strong-per-worker", but the samples of an epoch grow with the number of workers.
    """

    method: str
    workers: int
    batch: int
    scaling: Scaling

    @property
    def batch_size(self) -> int:
        """The number of samples in a step, summed over all workers."""
        return self.batch if self.scaling == "strong" else self.batch * self.workers

    def steps_of(self, samples: int) -> int:
        """Return an epoch's number of steps; with weak scaling, `samples` is for each worker."""
        total = samples * self.workers if self.scaling == "weak" else samples
        return -(-total // self.batch_size)


_Counts = Annotated[
    tuple[_Count, ...], Field(min_length=1, max_length=_MOST), BeforeValidator(read_list)
]
_Scalings = Annotated[tuple[Scaling, ...], Field(min_length=1), BeforeValidator(read_list)]
_Names = Annotated[
    tuple[str, ...], Field(min_length=1, max_length=_MOST), BeforeValidator(read_list)
]


class ScaleSettings(Record):
    """The settings of `paceline scale`.

    The default of `kinds` is "rehearsed" if `device` is given, otherwise "measured".
    """

    kind: Literal["scale"] = "scale"
    model: Model
    workers: _Counts = Field((1, 2), description="Numbers of workers, such as 1,2,4.")
    batch_size: _Counts = Field(
        (16, 32, 64),
        description="Batch sizes, such as 16,32: total with strong scaling, otherwise per worker.",
    )
    strategy: _Names = Field(
        tuple(EXCHANGES), description="Strategies to compare, such as allreduce,tree."
    )
    scaling: _Scalings = Field(
        ("strong",),
        description=(
            "strong: workers share a batch. strong-per-worker: each worker has a batch. "
            "weak: each worker has a batch, and --samples samples per epoch."
        ),
    )
    overhead: bool = Field(
        False, description="Exchange gradients even with one worker, to measure the overhead."
    )
    kinds: Annotated[tuple[Kind, ...], BeforeValidator(read_list)] = Field(
        (),
        description=(
            "Kinds of step times: measured, rehearsed (with emulated layers) or predicted. "
            "Default: rehearsed with --device, else measured."
        ),
    )
    device: str | None = Field(None, description="Device to emulate: a name, or FILE.toml:NAME.")
    machine: str | None = Field(
        None,
        description="Machine to predict for: a name or a file. Default: this machine, profiled.",
    )
    repeats: int = Field(
        3,
        ge=1,
        le=1000,
        description="Number of repetitions of each configuration (strategy, workers, batch size).",
    )
    steps: int = Field(20, ge=5, description="Number of steps to time in a repetition.")
    samples: int = Field(
        262_144,
        ge=1,
        le=2**53,
        description="Samples per epoch: in total (strong scaling) or per worker (weak).",
    )
    input_shape: InputShape = None
    classes: int = Field(10, ge=2, description="Number of classes of the random samples.")
    profile_s: Seconds = Field(
        1.0, description="How long to profile the model before planning, in seconds."
    )
    deadline_s: Seconds = Field(600.0, description="Time limit of a repetition in seconds.")

    @field_validator("strategy")
    @classmethod
    def _methods_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in EXCHANGES:
                find_exchange(name)  # raises InvalidInput if the strategy does not exist
                raise ValueError(f"must contain only built-in strategies (got {name!r})")
        return names

    @model_validator(mode="before")
    @classmethod
    def _kinds_are_complete(cls, values: Any) -> Any:
        if isinstance(values, dict) and not values.get("kinds"):
            usual = Origin.MEASURED if values.get("device") is None else Origin.REHEARSED
            return {**values, "kinds": (usual,)}
        return values

    @field_validator("workers", "batch_size", "strategy", "scaling", "kinds")
    @classmethod
    def _each_once(cls, values: tuple[Any, ...]) -> tuple[Any, ...]:
        for value in values:
            if values.count(value) > 1:
                raise ValueError(f"has {value!r} twice")
        return values

    @model_validator(mode="after")
    def _machine_is_predicted(self) -> Self:
        if self.machine is not None and Origin.PREDICTED not in self.kinds:
            raise ValueError("machine: requires --kind predicted")
        if self.device is None and Origin.REHEARSED in self.kinds:
            raise ValueError("device: must be given with --kind rehearsed")
        if self.device is not None and Origin.REHEARSED not in self.kinds:
            raise ValueError("device: requires --kind rehearsed")
        if self.overhead and 1 not in self.workers:
            raise ValueError("overhead: requires 1 in --workers")
        if self.overhead and self.kinds == (Origin.PREDICTED,):
            raise ValueError("overhead: requires --kind measured or rehearsed")
        return self

    @property
    def trains(self) -> bool:
        """Whether the study trains models, to measure epochs or to profile this machine."""
        return Origin.MEASURED in self.kinds or (self.machine is None and self.device is None)

    @property
    def points(self) -> Iterator[Point]:
        """All combinations of strategy, number of workers, batch size and scaling."""
        for batch, workers, scaling, method in product(
            self.batch_size, self.workers, self.scaling, self.strategy
        ):
            yield Point(method, workers, batch, scaling)


class ScaleCell(Record):
    """The time and memory of an epoch with one strategy, number of workers and batch size.

    `batch`: as in `Point`. `epoch_s`: number of steps times the median step time. `spread`: lower
    and upper quartile of `epoch_s` over the repetitions; in a predicted cell, the range that should
    contain the measured time in nine of ten cases. The times from `forward_s` to `idle_s` are
    parts of `epoch_s`; the rest of it is loading. `memory_bytes`: largest memory of a worker.
    `capacity_bytes`: available memory of a worker. A cell with an `error` has none of these values.
    """

    method: str
    workers: _Count
    batch: _Count
    scaling: Scaling
    kind: Origin
    epoch_s: _Seconds | None = None
    spread: tuple[_Seconds, _Seconds] | None = None
    forward_s: _Seconds | None = None
    backward_s: _Seconds | None = None
    exposed_s: _Seconds | None = None
    update_s: _Seconds | None = None
    idle_s: _Seconds | None = None
    hidden_s: _Seconds | None = None
    memory_bytes: Annotated[int, Field(ge=0)] | None = None
    capacity_bytes: Annotated[float, Field(ge=0)] | None = None
    error: str | None = None

    @property
    def point(self) -> Point:
        """The method, workers, batch and scaling of the cell."""
        return Point(self.method, self.workers, self.batch, self.scaling)


class TimedCell(ScaleCell):
    """A cell with an epoch time and without an error."""

    epoch_s: _Seconds
    exposed_s: _Seconds = 0.0
    idle_s: _Seconds = 0.0
    memory_bytes: Annotated[int, Field(ge=0)] = 0

    @property
    def rate(self) -> float:
        """Samples per second, divided by the setting `samples`."""
        return (self.workers if self.scaling == "weak" else 1) / self.epoch_s

    @property
    def range_s(self) -> tuple[float, float]:
        """The lower and upper end of `epoch_s`; both are `epoch_s` if `spread` is unknown."""
        return self.spread or (self.epoch_s, self.epoch_s)

    def differs_from(self, other: "TimedCell") -> bool:
        """Return whether the ranges of the two epoch times do not overlap."""
        (low, high), (other_low, other_high) = self.range_s, other.range_s
        return high < other_low or other_high < low


def timed(cells: Iterable[ScaleCell]) -> list[TimedCell]:
    """Return the cells without an error."""
    return [
        TimedCell(**cell.model_dump(exclude_none=True))
        for cell in cells
        if cell.error is None and cell.epoch_s
    ]


def most_real(cells: Sequence[TimedCell]) -> list[TimedCell]:
    """Return all measured cells; if there are none, all rehearsed cells, or else all cells."""
    first = next((kind for kind in Origin if any(cell.kind is kind for cell in cells)), None)
    return [cell for cell in cells if cell.kind is first]


def unrest_of(cells: Iterable[ScaleCell]) -> float:
    """Return the largest relative spread of repetitions in any measured or rehearsed cell."""
    run = ((cell, cell.spread) for cell in timed(cells) if cell.kind is not Origin.PREDICTED)
    found = (unrest_between(spread[0], cell.epoch_s, spread[1]) for cell, spread in run if spread)
    return max(found, default=0.0)


class ScaleResult(Record):
    """A finished study: settings, cells and findings."""

    kind: Literal["scale"] = "scale"
    id: str
    paceline: str
    settings: ScaleSettings
    machine: dict[str, Any]
    cells: tuple[ScaleCell, ...]
    findings: tuple[Finding, ...]

    @model_validator(mode="after")
    def _is_of_a_study(self) -> Self:
        # Limit the rows, columns and bars of the report.
        for name in ("batch", "workers", "method"):
            count = len({getattr(cell, name) for cell in self.cells})
            if count > _MOST:
                raise ValueError(f"cells: has {count:,} values of {name}, at most {_MOST} allowed")
        return self
