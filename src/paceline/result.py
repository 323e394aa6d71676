"""The result of a run, as result.json holds it."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.core.compare import Comparison
from paceline.core.errors import InvalidInput
from paceline.planner import ERROR_BAR, Advice, Forecast, Ranking
from paceline.settings import RehearseSettings, TrainSettings, first_fault
from paceline.subbatch_result import SplitRow


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Origin(BaseModel):
    """What tells a rehearsal's result from others."""

    origin: Literal["rehearsed"] | None = None


class PlanRow(_Record):
    """One line of the plan table.

    `config` is the strategy's configuration; `efficiency` is samples a second over what the devices
    would reach on their own; `link_nbytes_per_step` is by direction of a link, of a ring on its
    slowest way, and `memory_nbytes` by device, and by host where one holds anything.
    """

    strategy: str
    codec: str | None = None
    config: dict[str, Any]
    workers: int
    placement: str
    devices: tuple[str, ...]
    step_s: float
    samples_per_s: float
    efficiency: float | None
    exposed_s: float
    wire_nbytes_per_step: float
    link_nbytes_per_step: dict[str, float]
    memory_nbytes: dict[str, int]
    why: str

    @classmethod
    def of(cls, forecast: Forecast) -> Self:
        """Return the line of a forecast."""
        return cls(
            strategy=forecast.strategy,
            codec=forecast.codec,
            config=asdict(forecast.config),
            workers=forecast.workers,
            placement=forecast.placement,
            devices=forecast.devices,
            step_s=forecast.step_s,
            samples_per_s=forecast.samples_per_s,
            efficiency=forecast.efficiency,
            exposed_s=forecast.breakdown.exposed_s,
            wire_nbytes_per_step=forecast.wire_nbytes,
            link_nbytes_per_step=dict(forecast.link_nbytes),
            memory_nbytes=dict(forecast.memory_nbytes),
            why=forecast.why,
        )


class AdviceRow(_Record):
    """Whether a codec pays: the best plan with one, and what it is compared with.

    `link_busy` is the share of the step without a codec on as many workers.
    """

    pays: bool
    codec: str
    strategy: str
    workers: int
    step_s: float
    plain_strategy: str
    plain_workers: int
    plain_step_s: float
    link_busy: float
    sentence: str

    @classmethod
    def of(cls, advice: Advice) -> Self:
        """Return the row of an advice."""
        plain, encoded = advice.plain, advice.encoded
        return cls(
            pays=advice.pays,
            codec=str(encoded.codec),
            strategy=encoded.strategy,
            workers=encoded.workers,
            step_s=encoded.step_s,
            plain_strategy=plain.strategy,
            plain_workers=plain.workers,
            plain_step_s=plain.step_s,
            link_busy=advice.beside.link_busy,
            sentence=advice.sentence,
        )


class RefusalRow(_Record):
    """A strategy that cannot be used on so many workers, and why."""

    strategy: str
    workers: int
    placement: str
    why: str


class RankingRows(_Record):
    """All plans of a machine, best first, and what is to be said of them.

    `workers_worth` are those beyond which more hardly gain, `error_bar` the mean absolute error of
    such predictions, as a share of what was measured. Both sentences are about the plans.
    """

    plans: tuple[PlanRow, ...]
    refused: tuple[RefusalRow, ...]
    workers_worth: int | None
    workers_sentence: str | None
    error_bar: float
    advice: AdviceRow | None

    @classmethod
    def of(cls, ranking: Ranking) -> Self:
        """Return the rows of a ranking."""
        advice = ranking.advice
        return cls(
            plans=tuple(PlanRow.of(forecast) for forecast in ranking),
            refused=tuple(RefusalRow(**asdict(refusal)) for refusal in ranking.refused),
            workers_worth=ranking.worth if ranking else None,
            workers_sentence=ranking.workers_sentence if ranking else None,
            error_bar=ERROR_BAR,
            advice=AdviceRow.of(advice) if advice else None,
        )

    @property
    def sentences(self) -> Iterator[str]:
        """What a terminal says below the table: of each strategy only its first refusal."""
        if self.workers_sentence:
            yield self.workers_sentence
        if self.advice:
            yield self.advice.sentence
        first = {row.strategy: row for row in reversed(self.refused)}
        for name, row in first.items():
            yield f"{name} is refused on {row.workers} workers: {row.why}"
        error = f"{100 * self.error_bar:.0f} %"
        yield f"predictions are off by {error} on average: plans closer than that may change places"


class EpochRow(_Record):
    """One epoch: mean training loss, loss and accuracy on the test samples, and its duration."""

    number: int
    train_loss: float
    test_loss: float
    accuracy: float
    seconds: float


class ComparisonRow(_Record):
    """One quantity in seconds a step; `error` is that of the first against the second."""

    quantity: str
    left_s: float
    right_s: float
    error: float | None


class ComparisonTable(_Record):
    """Two timelines side by side; `left` and `right` say what they are, such as "predicted"."""

    left: str
    right: str
    rows: tuple[ComparisonRow, ...]

    @classmethod
    def of(cls, comparison: Comparison) -> Self:
        """Return the table of a comparison."""
        rows = tuple(
            ComparisonRow(
                quantity=row.quantity, left_s=row.left_s, right_s=row.right_s, error=row.error
            )
            for row in comparison.rows
        )
        return cls(left=comparison.left, right=comparison.right, rows=rows)


class TrialRow(_Record):
    """A chunk size that a search has tried: layers, and seconds a step."""

    chunk: int
    predicted_s: float
    rehearsed_s: float


class RehearsalResult(_Record):
    """What a rehearsal did: its result.json.

    `devices` says what the workers stood for. `rehearsed_step_s` is the median over all steps but
    the traced ones, which lie between the quartiles for half of them; `comparison` is about the
    traced ones. `config` is the strategy's configuration, with the chunk that a search has chosen;
    `trials` are those of the search. `faults` lists where the trace departs from the plan. `shares`
    are each worker's part of a batch in the end, where batches are balanced.
    """

    origin: Literal["rehearsed"] = "rehearsed"
    id: str
    settings: RehearseSettings
    machine: dict[str, Any]
    devices: str
    config: dict[str, Any]
    plan: PlanRow
    trials: tuple[TrialRow, ...]
    predicted_step_s: float
    rehearsed_step_s: float
    lower_quartile_s: float
    upper_quartile_s: float
    samples_per_s: float
    comparison: ComparisonTable
    faults: tuple[str, ...]
    peak_memory_bytes: tuple[int, ...]
    shares: tuple[int, ...] | None = None

    @property
    def prediction_error(self) -> float:
        """How far the predicted step is from the rehearsed one, as a share of the rehearsed."""
        return self.predicted_step_s / self.rehearsed_step_s - 1


class Result(_Record):
    """What a run did: result.json.

    `strategy` is the one that was used in the end, and `decisions` say why where it was chosen.
    `score` is what `accuracy` is called: "precision@1" where a sample may have several labels.
    `measured_step_s` is the median over all steps but the traced ones; `comparison` is about the
    traced ones. `faults` lists where the trace departs from the plan. `shares` are each worker's
    part of a batch in the end, where batches are balanced, and `split` is about a head that was
    split.
    """

    id: str
    settings: TrainSettings
    strategy: str
    decisions: tuple[str, ...]
    machine: dict[str, Any]
    plans: tuple[PlanRow, ...]
    epochs: tuple[EpochRow, ...]
    accuracy: float
    score: str = "accuracy"
    predicted_step_s: float
    measured_step_s: float
    samples_per_s: float
    comparison: ComparisonTable
    faults: tuple[str, ...]
    peak_memory_bytes: tuple[int, ...]
    shares: tuple[int, ...] | None = None
    split: SplitRow | None = None

    @property
    def prediction_error(self) -> float:
        """How far the predicted step is from the measured one, as a share of the measured."""
        return self.predicted_step_s / self.measured_step_s - 1


def read_result(folder: Path) -> Result | RehearsalResult:
    """Return the result in a run's folder; InvalidInput names the file and what is wrong."""
    path = folder / "result.json"
    try:
        text = path.read_bytes()
        record = RehearsalResult if _Origin.model_validate_json(text).origin else Result
        return record.model_validate_json(text)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(f"{path}: {first_fault(error)}") from None
