"""Steps that a strategy needs to a loss, relative to synchronous training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepsToLoss:
    """Measured number of steps to synchronous training's final loss, relative to its own.

    `low`, `high`: range over similar runs; `measured_on`: their models.
    """

    median: float
    low: float
    high: float
    measured_on: str
