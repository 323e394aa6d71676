"""Define the topics of messages between hub and workers, and check gradients and codecs."""

from collections.abc import Sequence
from enum import StrEnum

import torch
from torch import Tensor, nn

from paceline.codecs.names import find_codec
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import Purpose, remembers
from paceline.rpc import workers
from paceline.strategies.wheel import hubs_plan
from paceline.strategies.wheel.config import Wheel


class Topic(StrEnum):
    """The topic of a message between a worker and the hub.

    In a training step, a worker sends three requests: PARAMETERS, ACTIVATIONS (with the targets)
    and GRADIENTS. The hub may reply AGAIN to any request; then the step is void, and the worker
    sends BEGIN. A child hub requests WHOLE_PARAMETERS once; later, the replies to WHOLE_GRADIENTS
    contain the parameters.
    """

    PARAMETERS = Purpose.PARAMETERS.value
    ACTIVATIONS = Purpose.ACTIVATIONS.value
    GRADIENTS = Purpose.GRADIENTS.value
    WHOLE_PARAMETERS = hubs_plan.PARAMETERS
    WHOLE_GRADIENTS = hubs_plan.GRADIENTS
    BEGIN = "begin"
    PROFILE = "profile"
    PROBE = "probe"
    CLOCK = "clock"
    BUFFERS = "buffers"
    DONE = "done"
    FAILED = workers.FAILED
    AGAIN = workers.AGAIN


ASKED = frozenset(Topic) - {Topic.AGAIN}  # the topics of workers' requests
UPDATES = (Topic.GRADIENTS, Topic.WHOLE_GRADIENTS)
FREEING = (*UPDATES, Topic.DONE, Topic.PROFILE)  # after these, the hub may execute waiting requests
# The topics that need a training worker; a worker that the hub has dropped gets AGAIN.
OF_LIVE = (Topic.PARAMETERS, Topic.ACTIVATIONS, Topic.WHOLE_PARAMETERS, *UPDATES, Topic.DONE)


def take_gradients(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return and clear the parameters' gradients; InvalidInput if one is sparse or missing."""
    found = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    gradients = []
    for name, gradient in zip(names, found, strict=True):
        if gradient is None:
            hint = "freeze it (requires_grad = False), or use a data-parallel strategy"
            raise InvalidInput("model", f"parameter {name!r} got no gradient", hint=hint)
        if gradient.layout != torch.strided:
            hint = "build its layer with sparse=False for strategy wheel"
            raise InvalidInput("model", f"parameter {name!r} has sparse gradients", hint=hint)
        gradients.append(gradient)
    return gradients


def check_codecs(config: Wheel, dtype: torch.dtype) -> None:
    """Check that the configured codecs can encode their messages.

    Raises InvalidInput if there is a codec and `dtype` is not float32, or if messages other than
    gradients have a codec with error feedback.
    """
    for purpose, codec in config.codecs.items():
        find_codec(codec)
        if dtype != torch.float32:
            raise InvalidInput("codec", f"requires a float32 model, not {dtype}", got=codec)
        if purpose is not Purpose.GRADIENTS and remembers(codec):
            problem = "has error feedback, which only gradients support"
            raise InvalidInput("codec", problem, got=f"{purpose}={codec}")
