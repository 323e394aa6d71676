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

    @property
    def sentence(self) -> str:
        """The ratio with its range and models, as a sentence."""
        if self.low == self.high:
            between = f"{self.median:.2f}"
        else:
            between = f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"
        return (
            f"not the same training: {between} times the steps of synchronous training to its "
            f"loss, measured on {self.measured_on}, which is no promise for another model"
        )


UNKNOWN = "not the same training: nothing is known of the steps that it needs to a loss"
