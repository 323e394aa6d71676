"""The configuration of strategy subbatch."""

from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.cutting import LayerName
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import WIRE_FORMATS, check_codec, remembers

_FIXED = tuple(name for name in WIRE_FORMATS if not remembers(name))


def _check_fixed(name: str) -> str:
    if name in _FIXED:
        return name
    problem = f"codec: {name!r} is not one for activations and activation gradients"
    if name in WIRE_FORMATS:
        problem += (
            ": it adds its residual to the next values of the same tensor, and the next batch has "
            "other rows"
        )
    raise InvalidInput.of(f"{problem}; choose one of {', '.join(_FIXED)}")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SubBatch:
    """The workers train the body each on its batch, and the head together in sub-batches.

    `head` names the first layer that is split by its outputs; None is the longest run of linear
    layers at the end. `activations`, `activation_gradients` and `gradients` are the codecs of a
    head layer's gathered input, of the gradients by it, and of the body's gradients.
    The head's weights are updated once a `step`, or with the gradients of each `sub-batch`.
    `sub_batch` are the samples, of all workers together, that go through the head at a time; None
    makes as many sub-batches as there are workers.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    head: LayerName | None = None
    activations: Annotated[str, AfterValidator(_check_fixed)] | None = None
    activation_gradients: Annotated[str, AfterValidator(_check_fixed)] | None = None
    gradients: Annotated[str, AfterValidator(check_codec)] | None = None
    updates: Literal["step", "sub-batch"] = "step"
    sub_batch: Annotated[int, Field(ge=1)] | None = None

    def num_sub_batches(self, batch_size: int) -> int:
        """Return the sub-batches of a step in which no worker has more than `batch_size` samples.

        As often as `sub_batch` goes into the samples of all workers, rounded up. Each worker cuts
        its samples into so many parts, whose sizes differ by one at most. InvalidInput if a
        sub-batch were smaller than one sample of each worker, or larger than the step.
        """
        if self.sub_batch is None:
            return min(batch_size, self.workers)
        most = batch_size * self.workers
        if not self.workers <= self.sub_batch <= most:
            raise InvalidInput(
                "sub_batch",
                f"{self.sub_batch} samples do not fit",
                hint=(
                    f"with {batch_size} samples of each of {self.workers} workers it is from "
                    f"{self.workers} to {most}"
                ),
            )
        return min(batch_size, -(-most // self.sub_batch))
