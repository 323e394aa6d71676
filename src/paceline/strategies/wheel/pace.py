"""What a rehearsal paces devices by: how long each layer takes on them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.cost import Rate
from paceline.core.pace import LayerTimes
from paceline.strategies.wheel.split import Split

NUM_CLASSES = 2  # of the scores, which nobody looks at
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Pace(BaseModel):
    """The seconds of the whole model's layers, body and then head, and of an update.

    They are those of `samples`, each of `input_shape` if the model does not know it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    samples: Annotated[int, Field(ge=1)]
    input_shape: tuple[int, ...] | None
    forward_s: tuple[_Seconds, ...]
    backward_s: tuple[_Seconds, ...]
    update_s: _Seconds


def pace_of(
    parts: Split, times: LayerTimes, rate: Rate, is_gpu: bool, input_shape: tuple[int, ...] | None
) -> Pace:
    """Return the pace of devices with this rate, whose layers take `times`.

    A GPU tells its host when it has done the body's forward or backward, or the head's backward:
    the last layer of each takes that time, too, as in the plan.
    """
    forward_s, backward_s = list(times.forward_s), list(times.backward_s)
    if is_gpu:
        count = len(parts.body.layers)
        forward_s[count - 1] += rate.sync_latency_s
        backward_s[parts.body.backward_order[-1]] += rate.sync_latency_s
        backward_s[count + parts.head.backward_order[-1]] += rate.sync_latency_s
    return Pace(
        samples=parts.body.batch_size,
        input_shape=input_shape,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        update_s=times.update_s,
    )
