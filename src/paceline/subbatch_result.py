"""What a result says of a head that was split."""

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TrafficRow(_Record):
    """What a rank sent in a step for a purpose, the one that sent most, and what the plan has."""

    purpose: str
    nbytes_per_step: float
    planned_nbytes_per_step: float


class SplitRow(_Record):
    """What came of a head that was split: its layers, and what was sent for it and for the body.

    The state is parameters, gradients and momentum: of the whole head, and what each rank had.
    """

    head: tuple[str, ...]
    traffic: tuple[TrafficRow, ...]
    head_state_nbytes: int
    own_state_nbytes: tuple[int, ...]

    @property
    def saved_nbytes(self) -> int:
        """The bytes that the rank with the largest part has less than a whole head."""
        return self.head_state_nbytes - max(self.own_state_nbytes)
