"""Configuration of strategy subbatch."""

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.cutting import LayerName
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import WIRE_FORMATS, CodecName, remembers

_FIXED = tuple(name for name in WIRE_FORMATS if not remembers(name))


def _check_fixed(name: str) -> str:
    if name in _FIXED:
        return name
    known = ", ".join(_FIXED)
    raise ValueError(f"must be a codec without error feedback: {known} (got {name!r})")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SubBatch:
    """Options of strategy subbatch, which replicates the first layers and splits the last.

    Every worker has a copy of the model's first layers, the body. The last layers are the head; a
    worker computes some outputs of every layer of the head.

    `head`: name of the head's first layer; None: as many of the last layers as can be split.
    `activations`: codec of the inputs that workers gather for a layer of the head.
    `activation_gradients`: codec of the gradients of these inputs.
    `gradients`: codec of the gradients of the body's parameters.
    `updates`: update the head once per "step", or after each "sub-batch".
    `sub_batch`: number of samples in a sub-batch, which has samples of all workers; None: a step
    has `workers` sub-batches.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    head: LayerName | None = None
    activations: Annotated[str, AfterValidator(_check_fixed)] | None = None
    activation_gradients: Annotated[str, AfterValidator(_check_fixed)] | None = None
    gradients: CodecName | None = None
    updates: Literal["step", "sub-batch"] = "step"
    sub_batch: Annotated[int, Field(ge=1)] | None = None

    def num_sub_batches(self, batch_size: int) -> int:
        """Return the number of sub-batches per step.

        `batch_size`: the largest number of samples that a worker has. Raises InvalidInput if
        `sub_batch` has fewer samples than there are workers, or more than the whole batch.
        """
        if self.sub_batch is None:
            return min(batch_size, self.workers)
        most = batch_size * self.workers
        if not self.workers <= self.sub_batch <= most:
            raise InvalidInput(
                "sub_batch",
                f"must be from {self.workers} to {most}, because each of the {self.workers} "
                f"workers has {batch_size} samples",
                got=self.sub_batch,
            )
        return min(batch_size, -(-most // self.sub_batch))
