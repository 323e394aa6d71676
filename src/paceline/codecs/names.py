"""Codecs by name, as users write them."""

from collections.abc import Callable
from functools import partial

from paceline.codecs.blockwise import EightBit
from paceline.codecs.codec import Cast, Codec
from paceline.codecs.feedback import ErrorFeedback, OneBit, Threshold
from paceline.codecs.four_bit import FOUR_BIT_TABLES, FourBit
from paceline.codecs.quantization import TABLES
from paceline.core.errors import InvalidInput
from paceline.core.wire_format import FEEDBACK, check_codec, threshold_of


def _with_feedback(name: str) -> Codec:
    return ErrorFeedback(FourBit(name))


CODECS: dict[str, Callable[[], Codec]] = {
    **{name: partial(EightBit, name) for name in TABLES},
    **{name: partial(FourBit, name) for name in FOUR_BIT_TABLES},
    **{name + FEEDBACK: partial(_with_feedback, name) for name in FOUR_BIT_TABLES},
    "half": partial(Cast, "half"),
    "bfloat16": partial(Cast, "bfloat16"),
    "onebit": lambda: ErrorFeedback(OneBit()),
}


def find_codec(name: str) -> Codec:
    """Return a new codec of that name, or "threshold:TAU", with error feedback where it needs it.

    InvalidInput lists the known names.
    """
    threshold = threshold_of(check_codec(name))
    if threshold is not None:
        return ErrorFeedback(Threshold(threshold.tau))
    if name not in CODECS:
        raise InvalidInput("codec", f"{name!r} is a choice between codecs, and not one of them")
    return CODECS[name]()


def factory_of(codec: str | Codec) -> Callable[[], Codec]:
    """Return a factory of codecs: each tensor needs its own, where errors are fed back.

    What errors are fed back to is one object, which counts what all of them have sent.
    """
    found = find_codec(codec) if isinstance(codec, str) else codec
    if isinstance(found, ErrorFeedback):
        return partial(ErrorFeedback, found.codec)
    if isinstance(codec, str):
        return partial(find_codec, codec)
    return lambda: codec
