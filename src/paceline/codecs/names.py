"""Create codecs by the names that option --codec accepts."""

from collections.abc import Callable
from functools import partial

from paceline.codecs.blockwise import EightBit, FourBit
from paceline.codecs.codec import Cast, Codec
from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
from paceline.codecs.quantization import FOUR_BIT_TABLES, TABLES
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import FEEDBACK, check_codec, threshold_of

CODECS: dict[str, Callable[[], Codec]] = {
    **{name: partial(EightBit, name) for name in TABLES},
    **{name: partial(FourBit, name) for name in FOUR_BIT_TABLES},
    **{name + FEEDBACK: partial(ErrorFeedback, FourBit(name)) for name in FOUR_BIT_TABLES},
    "half": partial(Cast, "half"),
    "bfloat16": partial(Cast, "bfloat16"),
    "onebit": lambda: ErrorFeedback(OneBit()),
}


def find_codec(name: str) -> Codec:
    """Create a codec by its name: a key of `CODECS`, or "threshold:TAU".

    A codec that needs error feedback is returned inside `ErrorFeedback`. Raises InvalidInput for an
    unknown name, and for "auto".
    """
    threshold = threshold_of(check_codec(name))
    if threshold is not None:
        return ErrorFeedback(Threshold(threshold.tau))
    if name not in CODECS:
        problem = "must name a single codec, not auto"
        raise InvalidInput("codec", problem, hint="choose a codec, such as dynamic8")
    return CODECS[name]()


get = find_codec  # the public name: paceline.codecs.get


def factory_of(codec: str | Codec) -> Callable[[], Codec]:
    """Return a function that creates a tensor's codec; call it once for each tensor.

    For a codec with error feedback, each call returns a new `ErrorFeedback`, because each tensor
    has its own error. All these `ErrorFeedback` wrap the same codec, so a `Threshold` counts the
    values of all tensors.
    """
    found = find_codec(codec) if isinstance(codec, str) else codec
    if isinstance(found, ErrorFeedback):
        return partial(ErrorFeedback, found.codec)
    if isinstance(codec, str):
        return partial(find_codec, codec)
    return lambda: codec
