"""Steps that a way of training needs to a loss, beside synchronous training of as large batches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepsToLoss:
    """Steps to the loss that synchronous training ends with, as times its own; as measured.

    From the `low` to the `high` of all runs that are near; `measured_on` names their models.
    """

    median: float
    low: float
    high: float
    measured_on: str

    @property
    def sentence(self) -> str:
        """The figure with its range, and what it is of."""
        if self.low == self.high:
            between = f"{self.median:.2f}"
        else:
            between = f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"
        return (
            f"not the same training: {between} times the steps of synchronous training to its "
            f"loss, measured on {self.measured_on}, which is no promise for another model"
        )


UNKNOWN = "not the same training: nothing is known of the steps that it needs to a loss"
