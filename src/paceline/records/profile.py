"""The settings of a profile, and its result as in result.json."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from paceline.core.facts import Bytes
from paceline.core.outcome import Finding
from paceline.core.settings import Model, Port, Record, Seconds
from paceline.records.settings import strategy_config, validated
from paceline.strategies import find_exchange

SYNTHETIC = "synthetic"  # of the shape that the model takes


class ProfileSettings(Record):
    """The settings of `paceline profile`."""

    kind: Literal["profile"] = "profile"
    model: Model
    data: str | None = Field(
        None, description="As for train; by default synthetic ones, for token models text."
    )
    batch_size: int = Field(64, ge=1, description="Samples of a step, over all workers.")
    workers: int = Field(1, ge=1, description="Worker processes.")
    strategy: str = Field("allreduce", description="How workers exchange gradients.")
    options: dict[str, Any] = Field({}, description="Fields of the strategy's configuration.")
    steps: int = Field(
        20, ge=4, le=100_000, description="How many are measured as they are, and as many recorded."
    )
    largest_batch: bool = Field(False, description="Search for the largest batch that fits.")
    memory: Annotated[Bytes, Field(gt=0)] | None = Field(
        None, description="The bytes that a worker may have in that search, as 8GiB."
    )
    attempt_s: Seconds = Field(120.0, description="How long an attempt of that search may take.")
    seed: int = Field(0, ge=0, lt=2**63, description="Of the weights and the data.")
    deadline_s: Seconds = Field(30.0, description="How long a worker may not answer.")
    port: Port = 0
    output: Path = Field(Path("runs"), description="Where the folder of the run is made.")

    @model_validator(mode="after")
    def _memory_bounds_the_search(self) -> Self:
        size = self.batch_size
        if size < self.workers:
            raise ValueError(
                f"batch_size: {size} samples cannot be shared by {self.workers} workers"
            )
        if self.memory is not None and not self.largest_batch:
            raise ValueError("memory: goes only with largest_batch, whose search it bounds")
        return self


def validated_profile(values: dict[str, Any]) -> ProfileSettings:
    """Return the settings of these fields, or raise InvalidInput that names a wrong one."""
    settings = validated(ProfileSettings, values)
    strategy_config(find_exchange(settings.strategy), settings.options, settings.workers)
    return settings


_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Stage = Literal["load", "forward", "backward", "train", "hidden", "exposed", "update", "idle"]


class Quartiles(Record):
    """The median of repeated measurements in seconds, and the quartiles around it."""

    median_s: float
    lower_s: float
    upper_s: float


class LayerRow(Record):
    """The time of a layer in both directions, its parameters, and the bytes kept for backward."""

    name: str
    forward: Quartiles
    backward: Quartiles
    num_parameters: int
    kept_nbytes: int

    @property
    def median_s(self) -> float:
        """Forward and backward together."""
        return self.forward.median_s + self.backward.median_s


class StageRow(Record):
    """A part of the step: all parts but "hidden" add up to it."""

    stage: Stage
    seconds: _NotNegative


class ResourceRow(Record):
    """The busy and the idle time of a resource in a step."""

    resource: str
    busy_s: float
    idle_s: float


class OverheadRow(Record):
    """The time of calls and waits in a step, and its share of that step."""

    what: str
    seconds: float
    share: float
    calls: float | None = None  # in a step, where that has a meaning


class OperatorRow(Record):
    """An operator or a kernel, as torch.profiler names it, per step and without what it calls."""

    name: str
    calls: float
    seconds: float
    share: float  # of the time of all operators
    nbytes: int  # the memory allocated less that freed, over the step


class AgreementRow(Record):
    """A phase of the same steps, by our spans and by torch.profiler, in seconds a step."""

    phase: str
    ours_s: float
    torch_s: float
    in_operators_s: float  # the part of torch.profiler's time inside of operators

    @property
    def error(self) -> float:
        """The relative error of our time, given torch.profiler's."""
        return self.ours_s / self.torch_s - 1 if self.torch_s else 0.0


class WorkerMemoryRow(Record):
    """The memory of a worker's process before its first step, and at most while it trained.

    It is resident memory on a CPU; on a GPU, the memory that PyTorch has reserved.
    """

    worker: int
    before_nbytes: int
    training_nbytes: int


class TensorMemory(Record):
    """The bytes of the tensors of a worker's step, by kind and at their peak.

    The peak is `predicted` without running the model, and `measured` by PyTorch's allocator;
    neither includes the data set. `momentum` is all of the optimizer's state.
    """

    parameters: int
    gradients: int
    momentum: int
    features: int  # kept by forward for backward
    inputs: int
    predicted: int
    measured: Annotated[int, Field(gt=0)]

    @property
    def error(self) -> float:
        """The relative error of the predicted peak."""
        return self.predicted / self.measured - 1


class AttemptRow(Record):
    """A batch that was tried in a process of its own; `why` states the outcome."""

    batch_size: int
    fits: bool
    seconds: float
    why: str
    base_nbytes: int | None = None  # that the process held before the step, if it reported that


class LargestBatch(Record):
    """The largest batch of one worker that was seen to fit into `limit_nbytes`; 0 if none did."""

    batch_size: int
    limit_nbytes: int
    predicted: int  # from the predicted memory
    complete: bool  # False if the search ended at a deadline, so that larger ones may fit
    attempts: Annotated[tuple[AttemptRow, ...], Field(min_length=1)]


class ProfileResult(Record):
    """The findings of a profile; times are per step.

    `step` is the time of plain steps, `recorded_step` that of recorded ones, which took turns with
    them; `cost` is the relative difference. `stages` are means over the workers, from the timelines
    of the recorded steps; `recorded_typical_s` is the mean of the same steps by the clock alone.
    `unrest` is that of `core.losses`, of all workers' plain steps.
    Operators are those of worker 0, and so are `kernels_s`, the seconds in which a GPU's kernels
    run, copies included; None on a CPU.
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
        """The sum of the stages, which should be the step."""
        return sum(row.seconds for row in self.stages if row.stage != "hidden")

    @property
    def stages_error(self) -> float:
        """The relative error of the sum of the stages, given the recorded steps by the clock."""
        return self.stages_s / self.recorded_typical_s - 1

    @property
    def surplus_nbytes(self) -> int | None:
        """The memory of training on worker 0 less the mean of the others; None if alone."""
        if len(self.workers) < 2:
            return None
        first, *others = (row.training_nbytes - row.before_nbytes for row in self.workers)
        return first - sum(others) // len(others)
