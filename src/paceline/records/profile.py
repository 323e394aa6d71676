"""Settings and result of `paceline profile`."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from paceline.core.facts import parse_bytes
from paceline.core.outcome import Finding
from paceline.core.reading import validated
from paceline.core.settings import Model, Record, Seconds
from paceline.records.settings import strategy_config
from paceline.strategies import find_exchange

SYNTHETIC = "synthetic"  # value of `data`: random samples of the model's input shape


def _read_limit(limit: Any) -> Any:
    """Return "auto" unchanged, or convert a text such as 8GiB to bytes."""
    if limit is None or limit == "auto":
        return limit
    nbytes = parse_bytes(limit)
    if nbytes <= 0:
        raise ValueError(f"must be greater than 0 (got {limit})")
    return nbytes


class ProfileSettings(Record):
    """The settings of `paceline profile`."""

    kind: Literal["profile"] = "profile"
    model: Model
    data: str | None = Field(
        None,
        description=(
            "Data set, as for train. Default: a text for language models, else random samples."
        ),
    )
    batch_size: int = Field(64, ge=1, description="Samples per step, summed over all workers.")
    workers: int = Field(1, ge=1, description="Number of worker processes.")
    strategy: str = Field("allreduce", description="Strategy by which workers exchange gradients.")
    options: dict[str, Any] = Field(
        {}, description="Option of the strategy, such as chunk=4; can be repeated."
    )
    steps: int = Field(
        20,
        ge=4,
        le=100_000,
        description="Number of steps to time without tracing; as many other steps are traced.",
    )
    largest_batch: Annotated[float | Literal["auto"] | None, BeforeValidator(_read_limit)] = Field(
        None,
        description="Find the largest batch that fits a worker's memory (auto) or a limit (8GiB).",
    )
    deadline_s: Seconds = Field(
        30.0, description="Seconds without an answer after which a worker counts as lost."
    )
    output: Path = Field(
        Path("runs"), description="Folder in which to create the profile's folder."
    )

    @model_validator(mode="after")
    def _batch_fits_workers(self) -> Self:
        if self.batch_size < self.workers:
            problem = f"must be at least the number of workers, {self.workers}"
            raise ValueError(f"batch_size: {problem} (got {self.batch_size})")
        return self


def validated_profile(values: dict[str, Any]) -> ProfileSettings:
    """Validate the settings of a profile; InvalidInput names the invalid field."""
    settings = validated(ProfileSettings, values)
    strategy_config(find_exchange(settings.strategy), settings.options, settings.workers)
    return settings


_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Stage = Literal["load", "forward", "backward", "train", "hidden", "exposed", "update", "idle"]


class Quartiles(Record):
    """Median and quartiles of repeated measurements, in seconds."""

    median_s: float
    lower_s: float
    upper_s: float


class LayerRow(Record):
    """A layer's forward and backward times, parameters, and bytes kept for backward."""

    name: str
    forward: Quartiles
    backward: Quartiles
    num_parameters: int
    kept_nbytes: int

    @property
    def median_s(self) -> float:
        """Sum of the median forward and the median backward time."""
        return self.forward.median_s + self.backward.median_s


class StageRow(Record):
    """The time of a part of a step; "hidden" is exchange during other parts."""

    stage: Stage
    seconds: _NotNegative


class ResourceRow(Record):
    """Busy and idle seconds of a resource, such as a copy engine, in a step."""

    resource: str
    busy_s: float
    idle_s: float


class OverheadRow(Record):
    """An overhead, such as waiting for the exchange: its time and share of a step."""

    what: str
    seconds: float
    share: float
    calls: float | None = None  # number of calls in a step; None if not counted


class OperatorRow(Record):
    """An operator or kernel in torch.profiler; `seconds` excludes operators that it calls."""

    name: str
    calls: float
    seconds: float
    share: float  # share of the time of all operators
    nbytes: int  # bytes allocated minus bytes freed in a step


class AgreementRow(Record):
    """Compares the time of a phase, such as forward, in Paceline's spans and torch.profiler."""

    phase: str
    ours_s: float
    torch_s: float
    in_operators_s: float  # the part of `torch_s` that is spent within operators

    @property
    def error(self) -> float:
        """Relative error of Paceline's time, with torch.profiler's time as the reference."""
        return self.ours_s / self.torch_s - 1 if self.torch_s else 0.0


class WorkerMemoryRow(Record):
    """A worker's memory before its first step, and its peak during training.

    On a CPU, both numbers are resident memory; on a GPU, memory reserved by PyTorch.
    """

    worker: int
    before_nbytes: int
    training_nbytes: int


class TensorMemory(Record):
    """The bytes of a step's tensors, of each kind and of all together at the peak.

    `predicted`, `measured`: the peak without the data set, computed from the model and reported by
    PyTorch's allocator. `momentum`: the whole optimizer state.
    """

    parameters: int
    gradients: int
    momentum: int
    features: int  # feature maps kept for backward
    inputs: int
    predicted: int
    measured: Annotated[int, Field(gt=0)]

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return self.predicted / self.measured - 1


class AttemptRow(Record):
    """A batch size tried in a separate process, and `why` it fits or not."""

    batch_size: int
    fits: bool
    seconds: float
    why: str
    base_nbytes: int | None = None  # bytes held before the step, if reported


class LargestBatch(Record):
    """The largest batch that fits into `limit_nbytes` on a worker; `batch_size` 0: none fits."""

    batch_size: int
    limit_nbytes: int
    predicted: int  # the batch size that fits according to predicted memory
    complete: bool  # False if the search hit a deadline, so that larger batches may fit
    attempts: Annotated[tuple[AttemptRow, ...], Field(min_length=1)]


class ProfileResult(Record):
    """The result of a profile; times are per step.

    Recorded (traced) and plain (only timed) steps alternate. `step`: times of plain steps.
    `recorded_step`: times of recorded steps. `recorded_typical_s`: mean time of recorded steps,
    without the fastest and the slowest quarter. `cost`: how much longer a recorded step is than a
    plain one, as a fraction. `stages`: parts of a recorded step, averaged over the workers.
    `unrest`: relative spread of plain steps. `operators`: operators on worker 0. `kernels_s`:
    time of kernels and copies on worker 0's GPU; None on a CPU.
    """

    kind: Literal["profile"] = "profile"
    id: str
    settings: ProfileSettings
    machine: dict[str, Any]
    step: Quartiles
    recorded_step: Quartiles
    cost: float
    unrest: _NotNegative = 0.0
    recorded_typical_s: _Positive
    stages: tuple[StageRow, ...]
    forward: Quartiles
    backward: Quartiles
    update: Quartiles
    layers: tuple[LayerRow, ...]
    resources: tuple[ResourceRow, ...]
    overheads: tuple[OverheadRow, ...]
    operators: tuple[OperatorRow, ...]
    agreement: tuple[AgreementRow, ...]
    kernels_s: _Positive | None = None
    memory: TensorMemory
    workers: tuple[WorkerMemoryRow, ...]
    largest: LargestBatch | None
    samples_per_s: float
    findings: tuple[Finding, ...]
    peak_memory_bytes: tuple[int, ...]

    @property
    def stages_s(self) -> float:
        """The sum of all stages but "hidden"; should equal the time of a recorded step."""
        return sum(row.seconds for row in self.stages if row.stage != "hidden")

    @property
    def stages_error(self) -> float:
        """Relative difference of `stages_s` from the mean time of recorded steps."""
        return self.stages_s / self.recorded_typical_s - 1

    @property
    def surplus_nbytes(self) -> int | None:
        """Worker 0's training memory minus the other workers' mean; None for a single worker."""
        if len(self.workers) < 2:
            return None
        first, *others = (row.training_nbytes - row.before_nbytes for row in self.workers)
        return first - sum(others) // len(others)
