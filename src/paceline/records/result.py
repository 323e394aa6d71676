"""Results of runs and plans, and functions that read result.json of any `kind`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, Field, TypeAdapter, model_validator

from paceline.core.after_backward import AfterBackward
from paceline.core.compare import Comparison
from paceline.core.errors import InvalidInput, shown
from paceline.core.outcome import Finding, Outcome, RunMetrics, is_share
from paceline.core.reading import read_finite_record, read_record
from paceline.core.settings import Record, RehearseSettings, TrainSettings
from paceline.core.strategy import StepsToLoss
from paceline.core.timeline import Origin, quartiles
from paceline.links.files import limits, read_file
from paceline.planner import Forecast, Ranking, Refusal
from paceline.planner.forecast import range_of
from paceline.planner.second_machine import SecondMachine
from paceline.records.profile import ProfileResult
from paceline.records.scale import ScaleResult


class PlanRow(Record):
    """One planned configuration.

    `range_share`: in nine of ten cases, the median of the measured steps should be within
    `step_s` * (1 ± `range_share`). `efficiency`: throughput as a fraction of the throughput
    without exchange. `link_nbytes_per_step`: bytes sent over each link and direction (in a ring:
    over the slowest link). `memory_nbytes`: bytes needed on each device, and on each host that
    holds tensors. `hosts`: number of hosts on which workers run. `is_balanced`: whether faster
    workers get more samples. `after_backward`: duration of backward, and how much longer the
    exchange lasts; None if the strategy does not report it. `is_same_training`: whether the
    plan trains like one worker with the whole batch. `steps_to_loss`: number of steps to a given
    loss, relative to synchronous training; None if unknown.
    """

    strategy: str
    codec: str | None = None
    config: dict[str, Any]
    workers: int
    hosts: int = 1
    placement: str
    devices: tuple[str, ...]
    step_s: float
    range_share: float
    samples_per_s: float
    efficiency: float | None
    exposed_s: float
    wire_nbytes_per_step: float
    link_nbytes_per_step: dict[str, float]
    memory_nbytes: dict[str, int]
    why: str
    is_balanced: bool = False
    notes: tuple[str, ...] = ()
    after_backward: AfterBackward | None = None
    is_same_training: bool = True
    steps_to_loss: StepsToLoss | None = None

    @classmethod
    def of(cls, forecast: Forecast) -> Self:
        """Build the row of a forecast."""
        used = forecast.machine.devices[: forecast.workers]
        own = {
            "config": asdict(forecast.config),
            "hosts": len({device.host for device in used}),
            "exposed_s": forecast.breakdown.exposed_s,
            "wire_nbytes_per_step": forecast.wire_nbytes,
            "link_nbytes_per_step": dict(forecast.link_nbytes),
            "memory_nbytes": dict(forecast.memory_nbytes),
        }
        return cls(**own, **{n: getattr(forecast, n) for n in cls.model_fields if n not in own})

    @property
    def range_s(self) -> tuple[float, float]:
        """The shortest and longest expected step time."""
        return range_of(self.step_s, self.range_share)

    @property
    def explanation(self) -> str:
        """The reasons for the step time, and the plan's notes."""
        return "; ".join((self.why, *self.notes))

    @property
    def fullest_nbytes(self) -> int:
        """The bytes needed on the device or host that needs the most memory."""
        return max(self.memory_nbytes.values(), default=0)


class RankingRows(Record):
    """All plans of a machine, best first.

    `workers_worth`: the smallest number of workers whose throughput is within 2 % of the best;
    None if all plans have the same number of workers, above 1. `alone_samples_per_s`: throughput
    of the best plan for one worker, if planned.
    """

    plans: tuple[PlanRow, ...]
    refused: tuple[Refusal, ...]
    workers_worth: int | None
    alone_samples_per_s: float | None

    @classmethod
    def of(cls, ranking: Ranking) -> Self:
        """Build the rows of a ranking."""
        alone = ranking.alone or ranking.best_of.get(1)
        return cls(
            plans=tuple(map(PlanRow.of, ranking)),
            refused=ranking.refused,
            workers_worth=ranking.worth,
            alone_samples_per_s=alone.samples_per_s if alone else None,
        )

    @property
    def recommended(self) -> PlanRow | None:
        """The best plan that trains like one worker; if there is none, the best plan."""
        same = (plan for plan in self.plans if plan.is_same_training)
        return next(same, self.plans[0] if self.plans else None)


class RunResult(RunMetrics):
    """The result of a training, or of a rehearsal, which only emulates the layers.

    `strategy`: the strategy used last. `devices`: the emulated devices of a rehearsal. `plans`:
    forecasts before the first step, best first. `accuracy`: accuracy after the last epoch; None
    without a test. `step_s`: median time of untraced steps. `comparison`: parts of the traced
    steps next to their prediction.
    """

    kind: Literal["run"] = "run"
    origin: Literal[Origin.MEASURED, Origin.REHEARSED]
    id: str
    settings: Annotated[TrainSettings | RehearseSettings, Field(discriminator="kind")]
    strategy: str
    config: dict[str, Any] = Field({})
    devices: str = ""
    machine: dict[str, Any]
    plans: tuple[PlanRow, ...] = ()
    accuracy: float | None = None
    step_s: float | None = None
    lower_quartile_s: float | None = None
    upper_quartile_s: float | None = None
    comparison: Comparison | None = None
    findings: tuple[Finding, ...] = ()

    @model_validator(mode="after")
    def _steps_are_known(self) -> Self:
        if self.step_s is not None and not self.step_s > 0:
            raise ValueError(f"step_s: must be greater than 0 (got {self.step_s})")
        if self.comparison is not None:
            if self.step_s is None:
                raise ValueError("step_s: must be given if comparison is given")
            if not str(self.settings.workers).isdecimal():
                workers = shown(self.settings.workers)
                raise ValueError(
                    f"settings.workers: must be an integer if comparison is given (got {workers})"
                )
        return self

    @property
    def is_rehearsal(self) -> bool:
        """Whether this is a rehearsal, in which layers are emulated and nothing is learned."""
        return self.origin is Origin.REHEARSED

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.workers) or int(self.settings.workers)

    @property
    def predicted_range_s(self) -> tuple[float, float] | None:
        """The run's shortest and longest expected step time; None if `plans` lacks its plan."""
        for plan in self.plans:
            if (plan.strategy, plan.step_s) == (self.strategy, self.predicted_step_s):
                return plan.range_s
        return None

    @property
    def prediction_error(self) -> float | None:
        """Relative error of the predicted step time; None if it or the measured time is missing."""
        if self.predicted_step_s is None or not self.step_s:
            return None
        return self.predicted_step_s / self.step_s - 1

    @classmethod
    def of(cls, outcome: Outcome, **known: Any) -> Self:
        """Build the result of a run from its outcome; `known` contains the other fields."""
        own = {name: getattr(outcome, name) for name in RunMetrics.model_fields}
        is_accuracy = is_share(outcome.score) and bool(outcome.epochs)
        own["accuracy"] = outcome.epochs[-1].score if is_accuracy else None
        own["config"] = {} if outcome.config is None else asdict(outcome.config)
        if outcome.step_seconds:
            lower_s, own["step_s"], upper_s = quartiles(outcome.step_seconds)
            if len(outcome.step_seconds) > 1:
                own |= {"lower_quartile_s": lower_s, "upper_quartile_s": upper_s}
        return cls(**own | known)


class PlanResult(Record):
    """The plans of a model on a machine, best first.

    `machine`: a machine file's name, or "this machine". `facts`: Paceline's version, and a
    description of this machine. `second_machine`: how fast a second machine and the links to it
    must be to make training faster; None if not calculated.
    """

    kind: Literal["plan"] = "plan"
    id: str
    model: str
    machine: str
    batch_size: int
    input_shape: tuple[int, ...] | None = None
    facts: dict[str, Any]
    ranking: RankingRows
    findings: tuple[Finding, ...] = ()
    second_machine: SecondMachine | None = None


AnyResult = RunResult | PlanResult | ProfileResult | ScaleResult
_TYPES: dict[str, type[AnyResult]] = {
    kind.model_fields["kind"].default: kind for kind in get_args(AnyResult)
}


class _AnyKind(BaseModel):
    kind: Literal["run", "plan", "profile", "scale"]


def read_result(folder: Path) -> AnyResult:
    """Read the result in a folder; InvalidInput names the file and the problem."""
    _check_exists(folder)
    path = folder / "result.json"
    text, what = read_file(path, limits.RESULT), str(path)
    # Read `kind` first, because validation errors of the union AnyResult would name its classes.
    kind = _TYPES[read_finite_record(TypeAdapter(_AnyKind), text, what).kind]
    return read_record(TypeAdapter[AnyResult](kind), text, what)


def _check_exists(folder: Path) -> None:
    if not folder.is_dir():
        hint = "runs are in runs/, or in the folder given to --output"
        raise InvalidInput(str(folder), "is not a folder of a run", hint=hint)


def check_run(folder: Path) -> None:
    """Raise InvalidInput for a missing folder, or a folder of a plan, profile or study.

    A folder without result.json, as of an unfinished run, is no error.
    """
    _check_exists(folder)
    if (folder / "result.json").exists():
        read_run(folder)


def read_run(folder: Path) -> RunResult:
    """Read the result of a run or rehearsal; InvalidInput for another kind of result."""
    found = read_result(folder)
    if not isinstance(found, RunResult):
        raise InvalidInput(str(folder), "must be a run or rehearsal", got=found.kind)
    return found
