"""What a step takes, by the results of runs, and the cells of an epoch of such steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles
from typing import Literal

from paceline.core.timeline import Origin
from paceline.result import ComparisonTable, PlanRow, RehearsalResult, Result
from paceline.scale_result import Cell
from paceline.scale_settings import Point

_BESIDE = ("step", "hidden")  # which the parts of a step do not add up with


@dataclass(frozen=True)
class Step:
    """What one repetition found: a step's seconds, where they go, and the memory of a worker."""

    seconds: float
    parts: Mapping[str, float]
    memory_bytes: int

    @property
    def shares(self) -> dict[str, float]:
        """The parts in shares of the step; all but the hidden communication add up to 1."""
        whole = sum(value for name, value in self.parts.items() if name not in _BESIDE)
        return {name: value / whole if whole else 0.0 for name, value in self.parts.items()}


def measured_steps(result: Result) -> dict[Origin, Step]:
    """Return the step that a run has measured, and the one that it has predicted before."""
    (plan,) = (row for row in result.plans if row.strategy == result.strategy)
    return {
        "measured": Step(
            result.measured_step_s,
            _parts(result.comparison, "right"),
            max(result.peak_memory_bytes),
        ),
        "predicted": Step(result.predicted_step_s, _parts(result.comparison, "left"), needed(plan)),
    }


def rehearsed_steps(result: RehearsalResult) -> dict[Origin, Step]:
    """Return the step that was rehearsed, and the one that was predicted before.

    What paced layers hold in memory says nothing: for both it is what the plan says.
    """
    nbytes = needed(result.plan)
    return {
        "rehearsed": Step(result.rehearsed_step_s, _parts(result.comparison, "right"), nbytes),
        "predicted": Step(result.predicted_step_s, _parts(result.comparison, "left"), nbytes),
    }


def needed(plan: PlanRow) -> int:
    """Return the bytes that the fullest device of a plan needs."""
    return max(plan.memory_nbytes[name] for name in plan.devices)


def _parts(comparison: ComparisonTable, side: Literal["left", "right"]) -> dict[str, float]:
    return {row.quantity: getattr(row, f"{side}_s") for row in comparison.rows}


def cell(
    point: Point, kind: Origin, steps: Sequence[Step], samples: int, capacity_bytes: float
) -> Cell:
    """Return the cell of an epoch, from the steps that one or more repetitions have found."""
    number = point.steps_of(samples)
    seconds = [step.seconds for step in steps]
    epoch_s = number * median(seconds)

    def part(name: str) -> float:
        return epoch_s * fmean(step.shares.get(name, 0.0) for step in steps)

    lower_s, _, upper_s = (
        quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    )
    return Cell(
        **point._asdict(),
        kind=kind,
        epoch_s=epoch_s,
        spread=(number * lower_s, number * upper_s),
        forward_s=part("forward"),
        backward_s=part("backward"),
        exposed_s=part("exposed"),
        update_s=part("update"),
        idle_s=part("idle"),
        hidden_s=part("hidden"),
        memory_bytes=max(step.memory_bytes for step in steps),
        capacity_bytes=capacity_bytes,
    )
