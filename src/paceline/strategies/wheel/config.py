"""The configuration of strategy wheel."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from paceline.core.wire_format import check_codec

_Codec = Annotated[str, AfterValidator(check_codec)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Wheel:
    """Who works where, where the model is cut, and what travels encoded.

    `workers` train the body; each has a head worker at the hub. `lanes` of them alternate on one
    device; with one lane, which cannot alternate, a step uses the weights of the step before.
    `hub` is the host of the parameter server and the head workers, by default that of the machine's
    first device; they compute on its first device, and the bodies on the machine's other devices.
    `head` is the head's first layer, by default found by `split`. `activations`, `residuals`,
    `parameters` and `gradients` (of the body) are the codecs by which each travels.

    Of a run, not of the plan: no worker begins a step more than `staleness` steps before the
    slowest has completed as many; None lets it. The learning rate of an update whose gradients miss
    k updates is divided by 1 + k * `staleness_decay`.
    """

    workers: Annotated[int, Field(ge=1)] = 2
    lanes: Annotated[int, Field(ge=1)] = 2
    hub: str | None = None
    head: str | None = None
    activations: _Codec | None = None
    residuals: _Codec | None = None
    parameters: _Codec | None = None
    gradients: _Codec | None = None
    staleness: Annotated[int, Field(ge=0)] | None = 16
    staleness_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
