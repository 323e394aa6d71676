"""The result of a profile, as result.json holds it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from paceline.core.insight import Insight
from paceline.profile_settings import ProfileSettings
from paceline.result_file import read_kind


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Spread(_Record):
    """Seconds: the median of the repeats, and the quartiles around it."""

    median_s: float
    lower_s: float
    upper_s: float


class LayerRow(_Record):
    """A layer: its time each way, its parameters, and what it keeps for backward."""

    name: str
    forward: Spread
    backward: Spread
    num_parameters: int
    kept_nbytes: int

    @property
    def median_s(self) -> float:
        """Both ways together."""
        return self.forward.median_s + self.backward.median_s


class StageRow(_Record):
    """A part of the step: all parts but "hidden" add up to it."""

    stage: str
    seconds: float


class ResourceRow(_Record):
    """How long something was busy in a step, and how long it was not."""

    resource: str
    busy_s: float
    idle_s: float


class OverheadRow(_Record):
    """Time of a step that went into calls and waits: `share` is of the step it was seen in.

    `calls` is how many there were in a step, None where that has no meaning.
    """

    what: str
    seconds: float
    share: float
    calls: float | None = None


class OperatorRow(_Record):
    """An operator or a kernel, as torch.profiler names it, per step and without what it calls.

    `share` is of the time of all operators; `nbytes` what it takes from memory and keeps, as a sum
    over the step.
    """

    name: str
    calls: float
    seconds: float
    share: float
    nbytes: int


class AgreementRow(_Record):
    """A phase of the same steps, by our spans and by torch.profiler, in seconds a step.

    `in_operators_s` is the part of torch.profiler's that it spent inside operators.
    """

    phase: str
    ours_s: float
    torch_s: float
    in_operators_s: float

    @property
    def error(self) -> float:
        """How far ours is from torch.profiler's, as a share of that."""
        return self.ours_s / self.torch_s - 1 if self.torch_s else 0.0


class WorkerMemoryRow(_Record):
    """What a worker's process held before its first step, and at most while it trained.

    Resident memory on a CPU; on a GPU what PyTorch has reserved there.
    """

    worker: int
    before_nbytes: int
    training_nbytes: int


class TensorMemory(_Record):
    """What tensors of a worker's step take: by kind, and at most at once.

    `features` are what forward keeps for backward. `predicted` is found without running the model;
    `measured` is what PyTorch's allocator counted, the data set left out.
    """

    parameters: int
    gradients: int
    momentum: int
    features: int
    inputs: int
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """How far the predicted peak is from the measured one, as a share of the measured."""
        return self.predicted / self.measured - 1


class AttemptRow(_Record):
    """A batch that was tried in a process of its own; `why` says what came of it.

    Before it, the process held `base_nbytes`, None if it could not say so.
    """

    batch_size: int
    fits: bool
    seconds: float
    why: str
    base_nbytes: int | None = None


class LargestBatch(_Record):
    """The largest batch of one worker that was seen to fit into `limit_nbytes`.

    0 if none did. `predicted` is what the prediction of memory says; `complete` is false where the
    search ended at a deadline, and larger ones may fit.
    """

    batch_size: int
    limit_nbytes: int
    predicted: int
    complete: bool
    attempts: tuple[AttemptRow, ...]


class ProfileResult(_Record):
    """What a profile found; times are per step.

    `step` is that of steps as they are, `recorded_step` that of the recorded ones, which took turns
    with them; `cost` is what recording added, as a share. `stages` are means over the workers, from
    the recorded steps' timelines; `recorded_typical_s` is the same steps' mean by the clock alone.
    Operators are those of worker 0.
    """

    kind: Literal["profile"] = "profile"
    id: str
    settings: ProfileSettings
    machine: dict[str, Any]
    step: Spread
    recorded_step: Spread
    cost: float
    recorded_typical_s: float
    stages: tuple[StageRow, ...]
    forward: Spread
    backward: Spread
    update: Spread
    layers: tuple[LayerRow, ...]
    resources: tuple[ResourceRow, ...]
    overheads: tuple[OverheadRow, ...]
    operators: tuple[OperatorRow, ...]
    agreement: tuple[AgreementRow, ...]
    memory: TensorMemory
    workers: tuple[WorkerMemoryRow, ...]
    largest: LargestBatch | None
    samples_per_s: float
    insights: tuple[Insight, ...]
    peak_memory_bytes: tuple[int, ...]

    @property
    def stages_s(self) -> float:
        """The sum of the stages: what the step should be."""
        return sum(row.seconds for row in self.stages if row.stage != "hidden")

    @property
    def stages_error(self) -> float:
        """How far the sum of the stages is from the recorded steps by the clock, as a share."""
        return self.stages_s / self.recorded_typical_s - 1

    @property
    def surplus_nbytes(self) -> int | None:
        """What training takes more on worker 0 than on the others, on average; None if alone."""
        if len(self.workers) < 2:
            return None
        first, *others = (row.training_nbytes - row.before_nbytes for row in self.workers)
        return first - sum(others) // len(others)


def read_profile(folder: Path) -> ProfileResult | None:
    """Return the result in a profile's folder, or None if it is of another kind.

    InvalidInput names the file and what is wrong.
    """
    return read_kind(folder, "profile", ProfileResult)
