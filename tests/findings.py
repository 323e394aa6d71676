"""Runs with known parts of a step; codes and numbers of findings."""

import re
from collections.abc import Iterable
from typing import Any

from paceline.core.compare import Comparison, ComparisonRow
from paceline.core.outcome import Epoch, Finding
from paceline.core.settings import TrainSettings
from paceline.core.timeline import Timeline
from paceline.records.result import RunResult
from paceline.report.advice import findings
from paceline.report.metrics import of_run
from plan_rows import plan_row

EXCHANGES = {"load": 0, "forward": 4, "backward": 8, "update": 0.4, "exposed": 6, "idle": 1.6}
COMPUTES = {"load": 0, "forward": 30, "backward": 66, "update": 1, "exposed": 2, "idle": 1}
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?")


def numbers(text: str) -> list[float]:
    """Return the numbers of a sentence in order."""
    return [float(one.replace(",", "")) for one in _NUMBER.findall(text)]


def codes(found: Iterable[Finding]) -> list[str]:
    """Return the codes of findings in order."""
    return [one.code for one in found]


def epoch(number: int, test_loss: float, accuracy: float = 0.5) -> Epoch:
    """Return an epoch of 2 s with a training loss of 1."""
    return Epoch(number=number, train_loss=1, test_loss=test_loss, score=accuracy, seconds=2)


def run_result(**fields: Any) -> RunResult:
    """Return the result of training for an epoch, with `fields` replaced."""
    usual: dict[str, Any] = {
        "origin": "measured",
        "id": "run",
        "settings": TrainSettings(model="lenet5"),
        "strategy": "allreduce",
        "machine": {"processor": "some"},
        "epochs": (Epoch(number=0, train_loss=2, test_loss=1, score=0.5, seconds=3),),
        "accuracy": 0.5,
        "samples_per_s": 1.0,
    }
    return RunResult(**usual | fields)


def run(parts: dict[str, float], **changes: object) -> RunResult:
    """Return a run of two workers with an exact prediction, with fields replaced by `changes`.

    `parts`: seconds of each part of a step.
    """
    step = sum(parts.values())
    rows = {"step": step, "hidden": 0.5 * step} | parts
    result = run_result(
        settings=TrainSettings(model="net", workers=2),
        machine={"memory_bytes": 2**30},
        plans=(plan_row(step_s=step),),
        epochs=(epoch(0, 1),),
        predicted_step_s=step,
        step_s=step,
        samples_per_s=64 / step,
        comparison=Comparison(
            left="predicted",
            right="measured",
            rows=tuple(
                ComparisonRow(quantity=name, left_s=1, right_s=value, error=None)
                for name, value in rows.items()
            ),
        ),
        peak_memory_bytes=(2**28, 2**27),
    )
    return result.model_copy(update=changes)


def advised(result: RunResult, timeline: Timeline | None = None) -> list[str]:
    """Return the codes of a run's findings, the most valuable first."""
    return codes(findings(of_run(result, timeline)))
