"""What differs between two runs: settings, machine and versions, and what came of them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from paceline.report.format import Quantity, duration, nbytes, number, share
from paceline.result import ComparisonTable, RehearsalResult, Result, read_result
from paceline.uneven_result import UnevenResult, read_uneven
from paceline.wheel_result import WheelRehearsal, WheelResult, read_wheel

Happened = Result | RehearsalResult | UnevenResult | WheelResult | WheelRehearsal
_INDIFFERENT = ("output", "port", "tensorboard")  # settings by which nothing changes
_ALIKE = ("model", "batch_size", "data")  # without which seconds a step are not comparable
_HARDLY = 0.02


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Difference(_Record):
    """A setting or a fact, as both runs have it; None where a run has none."""

    name: str
    left: Any
    right: Any


class Figure(_Record):
    """Something that both runs measured; `unit` is that of the values."""

    name: str
    unit: str
    left: float
    right: float

    @property
    def shown(self) -> tuple[Quantity, Quantity]:
        """Both values as people read them."""
        return _shown(self.left, self.unit), _shown(self.right, self.unit)

    @property
    def change(self) -> float | None:
        """By how much the right is larger, as a share of the left; None if that is zero."""
        return self.right / self.left - 1 if self.left else None


class Differences(_Record):
    """What differs between two runs, and what that changed, in sentences."""

    figures: tuple[Figure, ...]
    settings: tuple[Difference, ...]
    machine: tuple[Difference, ...]
    sentences: tuple[str, ...]


def read_any(folder: Path) -> Happened:
    """Return the result of a run or a rehearsal; InvalidInput names the file and what is wrong."""
    return read_uneven(folder) or read_wheel(folder) or read_result(folder)


def differences(left: Happened, right: Happened, table: ComparisonTable) -> Differences:
    """Return what differs between two runs, of whose typical steps `table` tells."""
    figures = tuple(_figures(left, right))
    settings = tuple(_different(_settings(left), _settings(right)))
    machine = tuple(_different(left.machine, right.machine))
    sentences = tuple(_sentences(figures, settings, machine, table))
    return Differences(figures=figures, settings=settings, machine=machine, sentences=sentences)


def _shown(value: float, unit: str) -> Quantity:
    match unit:
        case "s":
            return duration(value)
        case "bytes":
            return nbytes(value)
        case "share":
            return share(value, 2)
        case _:
            return number(value)


def _figures(left: Happened, right: Happened) -> Iterator[Figure]:
    one, other = _values(left), _values(right)
    for (name, unit), value in one.items():
        if (name, unit) in other:
            yield Figure(name=name, unit=unit, left=value, right=other[name, unit])


def _values(result: Happened) -> dict[tuple[str, str], float]:
    """Return what a run measured, by its name and unit."""
    values: dict[tuple[str, str], float] = {}
    if not isinstance(result, RehearsalResult | WheelRehearsal):
        score = "accuracy" if isinstance(result, WheelResult) else result.score
        values[f"test {score}", "share"] = result.accuracy
        values["test loss", ""] = result.epochs[-1].test_loss
        values["training loss", ""] = result.epochs[-1].train_loss
        values["all epochs, without tests", "s"] = sum(epoch.seconds for epoch in result.epochs)
    step_s = _step_s(result)
    if step_s is not None:
        values["step, untraced", "s"] = step_s
    values["samples/s", ""] = result.samples_per_s
    if not isinstance(result, UnevenResult) and result.prediction_error is not None:
        values["prediction error", "share"] = result.prediction_error
    if result.peak_memory_bytes:
        values["peak memory of the fullest worker", "bytes"] = max(result.peak_memory_bytes)
    return values


def _step_s(result: Happened) -> float | None:
    if isinstance(result, RehearsalResult | WheelRehearsal):
        return result.rehearsed_step_s
    return None if isinstance(result, UnevenResult) else result.measured_step_s


def _settings(result: Happened) -> dict[str, Any]:
    """Return the settings, those of the strategy by their own names."""
    settings = result.settings.model_dump(mode="json", exclude=set(_INDIFFERENT))
    options = settings.pop("options", {})
    settings |= {f"{name} (of the strategy)": value for name, value in options.items()}
    if isinstance(result, Result):
        settings["strategy in the end"] = result.strategy
    return settings


def _different(left: Mapping[str, Any], right: Mapping[str, Any]) -> Iterator[Difference]:
    for name in dict.fromkeys([*left, *right]):
        one, other = left.get(name), right.get(name)
        if one != other:
            yield Difference(name=name, left=one, right=other)


def _sentences(
    figures: tuple[Figure, ...],
    settings: tuple[Difference, ...],
    machine: tuple[Difference, ...],
    table: ComparisonTable,
) -> Iterator[str]:
    rates = next(figure for figure in figures if figure.name == "samples/s")
    yield _faster(rates, table)
    unlike = [one.name for one in settings if one.name in _ALIKE]
    if unlike:
        names = " and ".join(name.replace("_", " ") for name in unlike)
        yield f"the runs differ in {names}: compare samples/s, and not seconds a step"
    else:
        yield _where(table)
    if not settings and not machine:
        yield "neither settings nor machine differ: what differs is the spread of such runs"
    elif machine:
        yield f"machine or versions differ in {_listed(machine)}"


def _faster(rates: Figure, table: ComparisonTable) -> str:
    times = rates.right / rates.left if rates.left else float("nan")
    left, right = (f"{shown} samples/s" for shown in rates.shown)
    return f"{table.right} trains {right}, {times:.2f} times those of {table.left} ({left})"


def _where(table: ComparisonTable) -> str:
    """Say which part of a step changed most; hidden communication is no part of it."""
    step, *parts = table.rows
    changed = max(
        (row for row in parts if row.quantity != "hidden"),
        key=lambda row: abs(row.right_s - row.left_s),
    )
    by_s = step.right_s - step.left_s
    if abs(by_s) < _HARDLY * step.left_s:
        return "a traced step takes hardly more or less"
    part_s = changed.right_s - changed.left_s
    more = "longer" if by_s > 0 else "shorter"
    name = {"exposed": "exposed communication", "update": "the weight update"}.get(
        changed.quantity, changed.quantity
    )
    return (
        f"a traced step is {duration(abs(by_s))} {more}; what changed most is {name}, by "
        f"{'+' if part_s > 0 else ''}{duration(part_s)}"
    )


def _listed(found: tuple[Difference, ...]) -> str:
    return ", ".join(one.name.replace("_", " ") for one in found)
