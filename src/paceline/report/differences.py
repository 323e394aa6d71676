"""Compare two runs: their settings, machines, versions and results."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.core.compare import Comparison
from paceline.core.outcome import Finding
from paceline.core.settings import Record
from paceline.records.result import RunResult
from paceline.report import advice
from paceline.report.figures import PARTS
from paceline.report.format import Quantity, duration, nbytes, number, share

_INDIFFERENT = {"output", "tensorboard"}  # settings that do not affect a run's results
_ALIKE = ("model", "batch_size", "data")  # must be equal to compare seconds per step
_SHOWN: dict[str, Callable[[float], Quantity]] = {
    "s": duration,
    "bytes": nbytes,
    "share": partial(share, decimals=2),
    "": number,
}


class Difference(Record):
    """A setting or machine fact with different values in two runs; None: missing."""

    name: str
    left: Any
    right: Any


class Figure(Record):
    """A result that both runs measured; `unit` applies to both values."""

    name: str
    unit: str
    left: float
    right: float

    @property
    def shown(self) -> tuple[Quantity, Quantity]:
        """Both values, formatted with their unit."""
        return _SHOWN[self.unit](self.left), _SHOWN[self.unit](self.right)

    @property
    def change(self) -> float | None:
        """Relative change from left to right; None if the left value is zero."""
        return self.right / self.left - 1 if self.left else None


class Differences(Record):
    """All differences between two runs, and findings that summarize them."""

    figures: tuple[Figure, ...]
    settings: tuple[Difference, ...]
    machine: tuple[Difference, ...]
    findings: tuple[Finding, ...]


def differences(left: RunResult, right: RunResult, table: Comparison) -> Differences:
    """Compare two runs; `table` compares their typical steps."""
    one, other = _figures(left), _figures(right)
    figures = tuple(
        Figure(name=name, unit=unit, left=value, right=other[name, unit])
        for (name, unit), value in one.items()
        if (name, unit) in other
    )
    settings = _different(settings_of(left), settings_of(right))
    machine = _different(left.machine, right.machine)
    found = advice.findings(_metrics(figures, settings, machine, table))
    return Differences(figures=figures, settings=settings, machine=machine, findings=found)


def _figures(result: RunResult) -> dict[tuple[str, str], float]:
    values: dict[tuple[str, str], float] = {}
    if result.accuracy is not None:
        values[f"test {result.score}", "share"] = result.accuracy
    if result.epochs:
        last = result.epochs[-1]
        if last.score is not None and result.accuracy is None:
            values[f"test {result.score}", ""] = last.score
        if last.test_loss is not None:
            values["test loss", ""] = last.test_loss
        values["training loss", ""] = result.epochs[-1].train_loss
        values["all epochs, without tests", "s"] = sum(epoch.seconds for epoch in result.epochs)
    if result.step_s is not None:
        values["step, untraced", "s"] = result.step_s
    values["samples/s", ""] = result.samples_per_s
    if result.prediction_error is not None:
        values["prediction error", "share"] = result.prediction_error
    if result.peak_memory_bytes:
        values["peak memory of the fullest worker", "bytes"] = max(result.peak_memory_bytes)
    return values


def settings_of(result: RunResult) -> dict[str, Any]:
    """Return the settings that can differ between runs; strategy options are separate entries."""
    settings = result.settings.model_dump(mode="json", exclude=_INDIFFERENT)
    options = settings.pop("options", {})
    settings |= {f"{name} (of the strategy)": value for name, value in options.items()}
    return settings | {"strategy in the end": result.strategy}


def _different(left: Mapping[str, Any], right: Mapping[str, Any]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name=name, left=left.get(name), right=right.get(name))
        for name in dict.fromkeys([*left, *right])
        if left.get(name) != right.get(name)
    )


def _metrics(
    figures: tuple[Figure, ...],
    settings: tuple[Difference, ...],
    machine: tuple[Difference, ...],
    table: Comparison,
) -> advice.Metrics:
    rates = next(figure for figure in figures if figure.name == "samples/s")
    step, *parts = table.rows
    by_s = step.right_s - step.left_s
    changes = {row.quantity: row.right_s - row.left_s for row in parts if row.quantity != "hidden"}
    part = max(changes, key=lambda quantity: abs(changes[quantity]), default="step")
    change_s = changes.get(part, by_s)
    unlike = [one.name.replace("_", " ") for one in settings if one.name in _ALIKE]
    ratio = rates.right / rates.left if rates.left else 0.0
    values = {
        "times_the_rate": ratio,
        "unlike_settings": float(len(unlike)),
        "step_changed": abs(by_s) / step.left_s if step.left_s else 0.0,
        "same_setup": float(not settings and not machine),
    }
    words = dict(zip(("left_rate", "right_rate"), map(str, rates.shown), strict=True))
    words |= {"left": table.left, "right": table.right, "ratio": f"{ratio:.2f}"}
    words |= {"unlike": " and ".join(unlike), "part": PARTS[part].label if part in PARTS else part}
    words |= {"by": duration(abs(by_s)), "longer": "longer" if by_s > 0 else "shorter"}
    words["change"] = f"{'+' if change_s > 0 else ''}{duration(change_s)}"
    return advice.Metrics(values, words)
