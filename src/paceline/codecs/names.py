"""Codecs by name, as users write them."""

from collections.abc import Callable
from functools import partial

from paceline.codecs.cast import Cast
from paceline.codecs.codec import Codec
from paceline.codecs.eightbit import EightBit
from paceline.codecs.feedback import ErrorFeedback
from paceline.codecs.onebit import OneBit
from paceline.codecs.table import TABLES
from paceline.core.errors import InvalidInput

CODECS: dict[str, Callable[[], Codec]] = {
    **{name: partial(EightBit, name) for name in TABLES},
    "half": partial(Cast, "half"),
    "bfloat16": partial(Cast, "bfloat16"),
    "onebit": lambda: ErrorFeedback(OneBit()),
}


def find_codec(name: str) -> Codec:
    """Return a new codec of that name. InvalidInput, with the known names, if there is none."""
    if name not in CODECS:
        raise InvalidInput(f"codec: {name!r} is not known; choose one of {', '.join(CODECS)}")
    return CODECS[name]()
