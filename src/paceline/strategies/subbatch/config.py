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
    raise InvalidInput(f"{problem}; choose one of {', '.join(_FIXED)}")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SubBatch:
    """The workers train the body each on its batch, and the head together in sub-batches.

    `head` names the first layer that is split by its outputs; None is the longest run of linear
    layers at the end. `activations`, `activation_gradients` and `gradients` are the codecs of a
    head layer's gathered input, of the gradients by it, and of the body's gradients.
    The head's weights are updated once a `step`, or with the gradients of each `sub-batch`.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    head: LayerName | None = None
    activations: Annotated[str, AfterValidator(_check_fixed)] | None = None
    activation_gradients: Annotated[str, AfterValidator(_check_fixed)] | None = None
    gradients: Annotated[str, AfterValidator(check_codec)] | None = None
    updates: Literal["step", "sub-batch"] = "step"
